# install(): the library, its headers, the command, and the package files for find_package(annulus).
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/annulus)

install(TARGETS annulus annulus_dependencies annulus_openmp EXPORT annulusTargets COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/annulus DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
  COMPONENT development
  FILES_MATCHING PATTERN "*.h" PATTERN "*.cuh" PATTERN "test" EXCLUDE
  PATTERN "*-inl.h" EXCLUDE)
install(EXPORT annulusTargets NAMESPACE annulus:: DESTINATION ${package_dir}
  COMPONENT development)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/annulusConfig.cmake.in
  ${PROJECT_BINARY_DIR}/annulusConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/annulusConfig.cmake
  ${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake
  ${PROJECT_SOURCE_DIR}/cmake/FindHighway.cmake DESTINATION ${package_dir}
  COMPONENT development)

# The annulus command is installed by cli/, the Python package by python/ (component python).
