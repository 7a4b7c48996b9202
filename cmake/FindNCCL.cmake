# NCCL: where NCCL_INCLUDE_DIR and NCCL_LIBRARY say, beside CUDA, on the system, or else as pip has it for
# Python_EXECUTABLE (nvidia-nccl-cu13, which torch brings: nvidia/nccl of its site-packages).
#   NCCL_FOUND, NCCL_VERSION
#   NCCL::NCCL               header and library
find_path(NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
find_library(NCCL_LIBRARY nccl HINTS ${CUDAToolkit_LIBRARY_DIR})
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_LIBRARY)
macro(_nccl_read_version)
  set(NCCL_VERSION)
  if(NCCL_INCLUDE_DIR)
    file(STRINGS ${NCCL_INCLUDE_DIR}/nccl.h _nccl_lines REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]" "" _nccl_numbers "${_nccl_lines}")
    list(JOIN _nccl_numbers "." NCCL_VERSION)
  endif()
endmacro()
_nccl_read_version()

if(NOT (NCCL_INCLUDE_DIR AND NCCL_LIBRARY) OR NCCL_VERSION VERSION_LESS "${NCCL_FIND_VERSION}")
  find_package(Python QUIET COMPONENTS Interpreter)
  set(_nccl_pip)
  # As torch is looked for: -E sees past the environment that pip builds in.
  foreach(_nccl_environment IN ITEMS "" -E)
    if(Python_Interpreter_FOUND AND NOT _nccl_pip)
      execute_process(COMMAND ${Python_EXECUTABLE} ${_nccl_environment} -c
        "import importlib.util as u; print(u.find_spec('nvidia.nccl').submodule_search_locations[0], end='')"
        OUTPUT_VARIABLE _nccl_pip ERROR_QUIET)
    endif()
  endforeach()
  # It has no libnccl.so for find_library to find. Both from there: a header of another version would not do.
  if(EXISTS "${_nccl_pip}/include/nccl.h" AND EXISTS "${_nccl_pip}/lib/libnccl.so.2")
    set(NCCL_INCLUDE_DIR ${_nccl_pip}/include CACHE PATH "" FORCE)
    set(NCCL_LIBRARY ${_nccl_pip}/lib/libnccl.so.2 CACHE FILEPATH "" FORCE)
    _nccl_read_version()
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::NCCL)
  add_library(NCCL::NCCL SHARED IMPORTED)
  set_target_properties(NCCL::NCCL PROPERTIES IMPORTED_LOCATION ${NCCL_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${NCCL_INCLUDE_DIR})
endif()
