# NCCL: where NCCL_INCLUDE_DIR and NCCL_LIBRARY say, beside CUDA, on the system, or as pip has it for Python_EXECUTABLE
# (nvidia-nccl-cu13, which torch brings: nccl.h and libnccl.so.2 in nvidia/nccl of its site-packages).
#   NCCL_FOUND, NCCL_VERSION
#   NCCL::NCCL               header and library
set(_nccl_pip)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
if(NOT NCCL_INCLUDE_DIR)
  find_package(Python QUIET COMPONENTS Interpreter)
  # As torch is looked for: -E sees past the environment that pip builds in.
  foreach(_nccl_environment IN ITEMS "" -E)
    if(Python_Interpreter_FOUND AND NOT _nccl_pip)
      execute_process(COMMAND ${Python_EXECUTABLE} ${_nccl_environment} -c
        "import importlib.util as u; print(u.find_spec('nvidia.nccl').submodule_search_locations[0], end='')"
        OUTPUT_VARIABLE _nccl_pip ERROR_QUIET)
    endif()
  endforeach()
  if(_nccl_pip)
    find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${_nccl_pip}/include)
  endif()
endif()
# The library of that header and no other.
if(NCCL_INCLUDE_DIR)
  cmake_path(GET NCCL_INCLUDE_DIR PARENT_PATH _nccl_root)
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${_nccl_root}/lib ${CUDAToolkit_LIBRARY_DIR})
  file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h _nccl_lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _nccl_numbers "${_nccl_lines}")
  list(JOIN _nccl_numbers "." NCCL_VERSION)
endif()
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL UNKNOWN IMPORTED)
  set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
