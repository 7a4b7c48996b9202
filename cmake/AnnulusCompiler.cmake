# How our own code is compiled: warnings are errors, symbols are hidden, binaries are hardened.
# No fast-math anywhere, and -ffp-contract stays at the compiler's default: the numbers are a promise.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  if(PROJECT_IS_TOP_LEVEL)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  elseif(NOT CMAKE_CXX_FLAGS MATCHES "(^| )-O")
    # The project around this one says nothing of speed: its build type is its own affair, but kernels
    # without optimisation are of no use to anybody. In this folder alone.
    add_compile_options($<$<COMPILE_LANGUAGE:CXX,CUDA>:-O3>)
  endif()
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

# Not an option of the product: the asan and tsan presets set it. Sanitizers must see every object
# of the program, so their flags are global rather than part of the target below.
set(ANNULUS_SANITIZE "" CACHE STRING "Sanitizers, as -fsanitize= takes them")
mark_as_advanced(ANNULUS_SANITIZE)
if(ANNULUS_SANITIZE)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${ANNULUS_SANITIZE};-fno-sanitize-recover=all;-fno-omit-frame-pointer;-g1>")
  add_link_options(-fsanitize=${ANNULUS_SANITIZE})
endif()

# Errors where we build; a project that contains this one may have a compiler with other opinions.
set(werror)
if(PROJECT_IS_TOP_LEVEL OR CMAKE_COMPILE_WARNING_AS_ERROR)
  set(werror -Werror)
endif()
set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)  # CMake's own would be every warning of nvcc as well
add_library(annulus_compiler_flags INTERFACE)
target_compile_options(annulus_compiler_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wconversion;${werror};-fstack-protector-strong>"
  # nvcc's generated host stubs do not survive -Wconversion; our own host code in .cu files is
  # held to the rest. -lineinfo costs nothing at run time and lets the profilers name our lines.
  "$<$<COMPILE_LANGUAGE:CUDA>:-lineinfo;--expt-relaxed-constexpr>"
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra$<$<BOOL:${werror}>:,-Werror>,-fstack-protector-strong>
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=cross-execution-space-call,reorder,deprecated-declarations>)
if(ANNULUS_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC takes the sanitizers' instrumentation for reads of unset variables, in <regex> for one.
  target_compile_options(annulus_compiler_flags INTERFACE
    $<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>)
endif()
if(NOT ANNULUS_SANITIZE)  # the sanitizers' own interceptors do this check better
  target_compile_options(annulus_compiler_flags INTERFACE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<NOT:$<CONFIG:Debug>>>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=2>")
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC 12 sees overlapping copies in every "literal" + std::string (its bug 105651).
  target_compile_options(annulus_compiler_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
# Of this folder, not of a target: a static library would hand them on to the programs of others.
# --as-needed: a program carries only the libraries it calls, whatever the build found.
add_link_options(LINKER:-z,relro LINKER:-z,now LINKER:--as-needed)

# Options, argument parsing, JSON, pages, tables: code that nobody times. -Og compiles it in three
# quarters of what -O1 takes and half of -O3, and keeps the checks of _FORTIFY_SOURCE, which -O0 has not.
set(ANNULUS_NOT_TIMED $<$<COMPILE_LANGUAGE:CXX>:-Og>)

# annulus_compile_together(TARGET SOURCE...): these files of TARGET as one translation unit. For files
# that mostly consist of the same headers (JSON, fmt, the command line's): in a clean build those are
# two thirds of what each file costs. The price is that editing one compiles them all, a few seconds,
# and that names in their unnamed namespaces must differ. Never for kernels or other code whose speed is
# measured: what the compiler inlines there should not depend on a neighbour.
function(annulus_compile_together target first)
  cmake_path(ABSOLUTE_PATH first OUTPUT_VARIABLE group)
  cmake_path(RELATIVE_PATH group BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
  string(MAKE_C_IDENTIFIER "${group}" group)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  set_source_files_properties(${first} ${ARGN} PROPERTIES UNITY_GROUP with_${group})
endfunction()
