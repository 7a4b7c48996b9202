# install(): the library, its public headers, the command, and what find_package(annulus) and pkg-config read. Nothing
# that is installed names a folder of the installation: it may be moved.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/annulus)

set(targets annulus)
set(modules)
set(pc_libs)
if(NOT BUILD_SHARED_LIBS)  # a static library leaves its dependencies to the final link
  list(APPEND targets annulus_dependencies annulus_openmp)
  set(modules ${PROJECT_SOURCE_DIR}/cmake/FindHighway.cmake)
  if(ANNULUS_HAVE_HWY AND Highway_LIBRARY)
    cmake_path(GET Highway_LIBRARY PARENT_PATH folder)
    list(APPEND pc_libs -L${folder} -lhwy)
  endif()
  if(ANNULUS_HAVE_OPENMP)
    list(TRANSFORM OpenMP_CXX_LIB_NAMES PREPEND -l OUTPUT_VARIABLE openmp)
    list(APPEND pc_libs ${openmp})
  endif()
  if(ANNULUS_HAVE_CUDA)
    list(APPEND pc_libs -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt)
  endif()
  list(APPEND pc_libs -pthread)
endif()
install(TARGETS ${targets} EXPORT annulusTargets COMPONENT development
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT annulusTargets NAMESPACE annulus:: DESTINATION ${package_dir}
  COMPONENT development)
# With a shared library it would need what that keeps to itself.
if(ANNULUS_HAVE_MPI AND NOT BUILD_SHARED_LIBS)
  install(TARGETS annulus_mpi EXPORT annulusMpiTargets COMPONENT development
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT annulusMpiTargets NAMESPACE annulus:: DESTINATION ${package_dir} COMPONENT development)
endif()
if(ANNULUS_HAVE_NCCL AND NOT BUILD_SHARED_LIBS)
  list(APPEND modules ${PROJECT_SOURCE_DIR}/cmake/FindNCCL.cmake)
  install(TARGETS annulus_nccl EXPORT annulusNcclTargets COMPONENT development
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(EXPORT annulusNcclTargets NAMESPACE annulus:: DESTINATION ${package_dir} COMPONENT development)
endif()
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/annulusConfig.cmake.in
  ${PROJECT_BINARY_DIR}/annulusConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/annulusConfig.cmake
  ${PROJECT_BINARY_DIR}/annulusConfigVersion.cmake ${modules} DESTINATION ${package_dir}
  COMPONENT development)

# pkg-config: from the file's own place to the prefix. What is private to a static library stands among Libs, so that it
# links with and without --static: an installation has one of the two kinds.
set(pc_dir ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
file(RELATIVE_PATH pc_prefix /prefix/${pc_dir} /prefix)
string(REGEX REPLACE "/$" "" pc_prefix ${pc_prefix})
list(JOIN pc_libs " " pc_libs)
configure_file(${PROJECT_SOURCE_DIR}/cmake/annulus.pc.in ${PROJECT_BINARY_DIR}/annulus.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/annulus.pc DESTINATION ${pc_dir} COMPONENT development)

# The annulus command is installed by cli/, the Python package by python/ (component python).
