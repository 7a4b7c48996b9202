# Highway (SIMD). Debian's libhwy-dev ships no usable CMake package for a static consumer, and a
# machine without that package may still have the headers (Highway_INCLUDE_DIR).
#   Highway_FOUND            the headers are there
#   Highway_VERSION
#   Highway_LIBRARY          empty when only headers are there: no run-time dispatch then
#   Highway::Highway         headers, and the library where it was found
find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(PC_HWY QUIET libhwy)
endif()
find_path(Highway_INCLUDE_DIR hwy/highway.h HINTS ${PC_HWY_INCLUDEDIR})
find_library(Highway_LIBRARY hwy HINTS ${PC_HWY_LIBDIR})
mark_as_advanced(Highway_INCLUDE_DIR Highway_LIBRARY)

if(Highway_INCLUDE_DIR)
  file(STRINGS ${Highway_INCLUDE_DIR}/hwy/highway.h _hwy_lines
    REGEX "^#define HWY_(MAJOR|MINOR|PATCH) ")
  string(REGEX REPLACE "[^0-9;]" "" _hwy_numbers "${_hwy_lines}")
  list(JOIN _hwy_numbers "." Highway_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Highway REQUIRED_VARS Highway_INCLUDE_DIR
  VERSION_VAR Highway_VERSION)

if(Highway_FOUND AND NOT TARGET Highway::Highway)
  if(Highway_LIBRARY)
    add_library(Highway::Highway UNKNOWN IMPORTED)
    set_target_properties(Highway::Highway PROPERTIES IMPORTED_LOCATION ${Highway_LIBRARY})
    if(Highway_LIBRARY MATCHES "\\.so")
      set_property(TARGET Highway::Highway PROPERTY INTERFACE_COMPILE_DEFINITIONS
        HWY_SHARED_DEFINE)
    endif()
  else()
    add_library(Highway::Highway INTERFACE IMPORTED)
  endif()
  set_property(TARGET Highway::Highway PROPERTY INTERFACE_INCLUDE_DIRECTORIES
    ${Highway_INCLUDE_DIR})
endif()
