# What the build found, as
#   ANNULUS_HAVE_{CUDA,HWY,BLAS,OPENMP,MPI,NCCL,TORCH}   variables (ON/OFF)
#   annulus_dependencies                                 what the library compiles and links with, but for
#   annulus_openmp                                       threads, which the PyTorch module has from torch
#   annulus_torch                                        headers of the PyTorch found (for python/)
# A definition of the same name (=1/0) has only what reads it, by annulus_reads(): the objects of a build with
# CUDA and one without are then the same files to a compiler cache.
# An option that is ON must be found or the configure step stops; AUTO uses what is there, and
# annulus_print_summary() says what follows. Nothing is ever downloaded.
include_guard(GLOBAL)

add_library(annulus_dependencies INTERFACE)
set_property(GLOBAL PROPERTY ANNULUS_SUMMARY "")

# One line of the summary: what it is, whether it is there, and what follows.
function(annulus_note name text)
  set_property(GLOBAL APPEND PROPERTY ANNULUS_SUMMARY "${name}|${text}")
endfunction()

# Sets ANNULUS_HAVE_<name> from the variable `found`. An option that is ON must be found.
macro(annulus_found name install_hint)
  if(found)
    set(ANNULUS_HAVE_${name} ON)
  elseif(ANNULUS_${name} AND NOT ANNULUS_${name} STREQUAL "AUTO")
    message(FATAL_ERROR "ANNULUS_${name}=${ANNULUS_${name}} but it was not found: ${install_hint}")
  else()
    set(ANNULUS_HAVE_${name} OFF)
  endif()
endmacro()

# annulus_reads(NAME TARGET target | SOURCE file...): these are compiled with ANNULUS_HAVE_NAME.
function(annulus_reads name kind)
  set_property(${kind} ${ARGN} APPEND PROPERTY COMPILE_DEFINITIONS
    ANNULUS_HAVE_${name}=$<BOOL:${ANNULUS_HAVE_${name}}>)
endfunction()

# annulus_without_kernels(SOURCE...): .cu files that call CUDA's runtime and hold no device code, compiled as C++: nvcc would
# parse all their headers again for each target (x86_64, on busy cores: three such files took 55 s with it, 23 s as C++).
function(annulus_without_kernels)
  if(ARGN)
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX)
    foreach(folder IN LISTS CUDAToolkit_INCLUDE_DIRS)  # newer CMakes list several
      set_property(SOURCE ${ARGN} APPEND PROPERTY COMPILE_OPTIONS -isystem${folder})
    endforeach()
  endif()
endfunction()

# Whether to look for it: an option that is OFF is not even looked for. Nothing is found so far.
macro(annulus_wanted name)
  set(found OFF)
  set(wanted ON)
  if(NOT ANNULUS_${name})
    set(wanted OFF)
    annulus_note(${name} "switched off (ANNULUS_${name}=OFF)")
  endif()
endmacro()

find_package(Threads REQUIRED)
target_link_libraries(annulus_dependencies INTERFACE Threads::Threads)

# --- CUDA: sm_90a machine code for Hopper, and PTX for anything from Ampere on ------------------
set(ANNULUS_CUDA_STRING "not built")
annulus_wanted(CUDA)
if(wanted)
  include(CheckLanguage)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(ANNULUS_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH
      PATHS /usr/local/cuda PATH_SUFFIXES bin)
    mark_as_advanced(ANNULUS_NVCC)
    if(ANNULUS_NVCC)
      set(CMAKE_CUDA_COMPILER ${ANNULUS_NVCC})
    endif()
  endif()
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES "80-virtual;90a-real")
  endif()
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13.0)
      annulus_note(CUDA "toolkit ${CMAKE_CUDA_COMPILER_VERSION} is too old (13.0 is needed): CPU only")
    else()
      find_package(CUDAToolkit REQUIRED)
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know it yet, nvcc does
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      set(CMAKE_CUDA_EXTENSIONS OFF)
      set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
      set(CMAKE_CUDA_SEPARABLE_COMPILATION OFF)
      # For the link alone: nvcc knows its headers, and two C++ files of ours have their path.
      target_link_libraries(annulus_dependencies INTERFACE $<LINK_ONLY:CUDA::cudart_static>)
      string(REGEX MATCH "^[0-9]+\\.[0-9]+" cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
      set(archs "")
      foreach(arch ${CMAKE_CUDA_ARCHITECTURES})
        if(arch MATCHES "^(.*)-virtual$")
          list(APPEND archs "compute_${CMAKE_MATCH_1} PTX")
        else()
          string(REPLACE "-real" "" arch ${arch})
          list(PREPEND archs "sm_${arch}")
        endif()
      endforeach()
      list(JOIN archs " + " archs)
      set(ANNULUS_CUDA_STRING "${cuda_version}, ${archs}")
      annulus_note(CUDA "${ANNULUS_CUDA_STRING}")
      set(found ON)
    endif()
  else()
    annulus_note(CUDA "no nvcc: CPU only, device \"cuda\" is NotSupported")
  endif()
endif()
annulus_found(CUDA "install the CUDA 13 toolkit and put nvcc on PATH or set CUDACXX")

# --- Highway: SIMD on the CPU --------------------------------------------------------------------
set(ANNULUS_HWY_STRING "none")
set(dispatch 0)
if(NOT DEFINED Highway_INCLUDE_DIR AND EXISTS ${PROJECT_SOURCE_DIR}/third_party/highway/hwy/highway.h)
  # Headers carried to a machine without the package; the system's package wins where it is there.
  find_path(Highway_INCLUDE_DIR hwy/highway.h)
  if(NOT Highway_INCLUDE_DIR)
    set(Highway_INCLUDE_DIR ${PROJECT_SOURCE_DIR}/third_party/highway CACHE PATH "" FORCE)
    find_library(Highway_LIBRARY hwy
      PATHS ${PROJECT_SOURCE_DIR}/third_party/highway/lib-${CMAKE_SYSTEM_PROCESSOR})
  endif()
endif()
find_package(Highway QUIET MODULE)
if(Highway_FOUND)
  target_link_libraries(annulus_dependencies INTERFACE Highway::Highway)
  set(own_alone OFF)  # x86_64 has three instruction sets, aarch64 one
  if(ANNULUS_SANITIZE AND CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
    set(own_alone ON)
  endif()
  if(Highway_LIBRARY AND NOT own_alone)
    set(dispatch 1)
    set(ANNULUS_HWY_STRING "Highway ${Highway_VERSION}, run-time dispatch")
    annulus_note(SIMD "${ANNULUS_HWY_STRING}")
  else()
    # One target for the whole build rather than for the kernels alone: inline functions compiled
    # for two instruction sets would otherwise meet at link time. Under sanitizers, too: those that the machine
    # would not choose never run, and they are half of the time to compile.
    target_compile_options(annulus_dependencies INTERFACE
      $<$<COMPILE_LANGUAGE:CXX>:-march=native>)
    set(ANNULUS_HWY_STRING "Highway ${Highway_VERSION}, compiled for the building machine")
    annulus_note(SIMD "${ANNULUS_HWY_STRING}: so the binary runs on CPUs like this one")
  endif()
  # Instruction sets are chosen: every one is another pass over all kernels. On x86_64 AVX2, AVX-512 and,
  # for processors without either, one lane (HWY_SCALAR, which is also what is left where Highway's
  # emulation of vectors is broken, as it is said to be: annulus/cpu/simd-inl.h has our own).
  set(disabled HWY_SSSE3 HWY_SSE4 HWY_AVX3_DL)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    list(APPEND disabled HWY_SVE HWY_SVE2 HWY_SVE_256 HWY_SVE2_128)  # GCC before 14 cannot compile them
  endif()
  list(JOIN disabled "|" disabled)
  target_compile_definitions(annulus_dependencies INTERFACE
    "HWY_DISABLED_TARGETS=(${disabled})" HWY_BROKEN_EMU128=1)
else()
  annulus_note(SIMD "no Highway (libhwy-dev): scalar CPU kernels, several times slower")
endif()
set(found ${Highway_FOUND})
annulus_found(HWY "install libhwy-dev")
target_compile_definitions(annulus_dependencies INTERFACE
  ANNULUS_HAVE_HWY=$<BOOL:${Highway_FOUND}> ANNULUS_HWY_DISPATCH=${dispatch})

# --- OpenMP: threads on the CPU ------------------------------------------------------------------
add_library(annulus_openmp INTERFACE)
set(ANNULUS_OPENMP_STRING "none")
if(ANNULUS_SANITIZE MATCHES "thread")
  # libgomp is not instrumented: every barrier of it would read as a race.
  set(OpenMP_CXX_FOUND OFF)
  annulus_note(OPENMP "off under ThreadSanitizer: std::thread instead")
else()
  find_package(OpenMP QUIET COMPONENTS CXX)
  if(OpenMP_CXX_FOUND)
    target_link_libraries(annulus_openmp INTERFACE OpenMP::OpenMP_CXX)
    set(ANNULUS_OPENMP_STRING "OpenMP ${OpenMP_CXX_VERSION}")
    annulus_note(OPENMP "${ANNULUS_OPENMP_STRING}")
  else()
    annulus_note(OPENMP "the compiler has none: plain threads where Context::threads asks, else one")
  endif()
endif()
set(found ${OpenMP_CXX_FOUND})
annulus_found(OPENMP "use a compiler with OpenMP")

# --- BLAS: the measured GEMM ceiling; only the benchmark loads it, when it measures ----------------
add_library(annulus_blas INTERFACE)
set(ANNULUS_BLAS_STRING "none")
set(found OFF)
if(ANNULUS_BENCH)
  set(BLA_VENDOR OpenBLAS)
  find_package(BLAS QUIET)
  find_path(CBLAS_INCLUDE_DIR cblas.h PATH_SUFFIXES openblas openblas-pthread
    ${CMAKE_LIBRARY_ARCHITECTURE})
  mark_as_advanced(CBLAS_INCLUDE_DIR)
endif()
if(NOT ANNULUS_BENCH)
  annulus_note(BLAS "not looked for: no benchmarks")
elseif(BLAS_FOUND AND CBLAS_INCLUDE_DIR)
  set(found ON)
  target_link_libraries(annulus_blas INTERFACE ${CMAKE_DL_LIBS})
  target_include_directories(annulus_blas SYSTEM INTERFACE ${CBLAS_INCLUDE_DIR})
  # By its soname, which a machine without the development package has too; by its place where that is none
  # the loader looks in.
  list(GET BLAS_LIBRARIES 0 ANNULUS_BLAS_PATH)
  cmake_path(GET ANNULUS_BLAS_PATH FILENAME ANNULUS_BLAS_SONAME)
  if(CMAKE_READELF)
    execute_process(COMMAND ${CMAKE_READELF} -d ${ANNULUS_BLAS_PATH} OUTPUT_VARIABLE dynamic ERROR_QUIET)
    if(dynamic MATCHES "\\(SONAME\\)[^[]*\\[([^]]+)\\]")
      set(ANNULUS_BLAS_SONAME ${CMAKE_MATCH_1})
    endif()
  endif()
  set(ANNULUS_BLAS_STRING "OpenBLAS (${ANNULUS_BLAS_SONAME}), loaded when ceilings are measured")
  annulus_note(BLAS "${ANNULUS_BLAS_STRING}")
else()
  annulus_note(BLAS "no OpenBLAS with cblas.h (libopenblas-dev): the GEMM ceiling is our own loop of multiply-adds")
endif()
annulus_found(BLAS "install libopenblas-dev")

# --- helpers of the benchmark, the training and the command; the library uses none of them ---------
if(ANNULUS_BENCH)
  # fmt is linked, not header-only: its templates in every file that formats were a sixth of the build.
  foreach(package fmt nlohmann_json CLI11)
    find_package(${package} CONFIG QUIET)
    if(NOT ${package}_FOUND)
      message(FATAL_ERROR "${package} was not found: install libfmt-dev, nlohmann-json3-dev and "
        "libcli11-dev, or switch ANNULUS_BENCH off")
    endif()
  endforeach()
endif()
if(ANNULUS_TESTS)
  find_package(GTest QUIET)
  if(NOT GTest_FOUND)
    message(FATAL_ERROR "GoogleTest was not found: install libgtest-dev or set ANNULUS_TESTS=OFF")
  endif()
  enable_testing()
  include(GoogleTest)
endif()

# The Python whose packages are looked at: that of scripts/setup, unless another is named.
macro(annulus_python_of_ours)
  if(NOT DEFINED Python_EXECUTABLE AND EXISTS ${PROJECT_SOURCE_DIR}/.venv/bin/python)
    set(Python_EXECUTABLE ${PROJECT_SOURCE_DIR}/.venv/bin/python)
  endif()
endmacro()

# --- transports: found here, used by the distributed operators -----------------------------------
annulus_wanted(MPI)
if(wanted)
  set(MPI_CXX_SKIP_MPICXX ON)  # the C interface is all we use
  find_package(MPI QUIET COMPONENTS CXX)
  set(found ${MPI_CXX_FOUND})
  set(version "MPI ${MPI_CXX_VERSION}: communicators of processes, in annulus_mpi")
  if(NOT found)
    set(version "not found (libopenmpi-dev): no communicators of processes")
  endif()
  annulus_note(MPI "${version}")
endif()
annulus_found(MPI "install libopenmpi-dev and openmpi-bin")

annulus_wanted(NCCL)
if(wanted AND ANNULUS_HAVE_CUDA)
  annulus_python_of_ours()
  find_package(NCCL 2.28 QUIET)
  set(found ${NCCL_FOUND})
  if(found)
    annulus_note(NCCL "NCCL ${NCCL_VERSION}: communicators of GPUs, in annulus_nccl")
  elseif(NCCL_VERSION)
    annulus_note(NCCL "${NCCL_VERSION} in ${NCCL_INCLUDE_DIR}: 2.28 is needed, and its library: no communicators of GPUs, nor their tests")
  else()
    annulus_note(NCCL "not found (libnccl-dev, or pip's nvidia-nccl-cu13): no communicators of GPUs, nor their tests")
  endif()
elseif(wanted)
  annulus_note(NCCL "not looked for: no CUDA")
endif()
annulus_found(NCCL "install NCCL 2.28 for CUDA 13 (libnccl-dev, or pip's nvidia-nccl-cu13 for the python3 that CMake finds), with ANNULUS_CUDA")

# --- PyTorch: headers only. The module is built on the stable ABI and loads into a running torch --
annulus_wanted(TORCH)
if(wanted)
  annulus_python_of_ours()
  find_package(Python QUIET COMPONENTS Interpreter)
  # Reads the installed package's data instead of importing it: seconds saved per configure.
  # pip builds in an environment of its own, which it sets up by PYTHON* variables; -E looks past them at the
  # torch the package will run with.
  set(torch)
  foreach(environment IN ITEMS "" -E)
    if(Python_Interpreter_FOUND AND NOT torch)
      execute_process(COMMAND ${Python_EXECUTABLE} ${environment} -c
        "import importlib.util as u, importlib.metadata as m; print(m.version('torch'), u.find_spec('torch').submodule_search_locations[0], sep=';', end='')"
        OUTPUT_VARIABLE torch ERROR_QUIET)
    endif()
  endforeach()
  if(NOT Python_Interpreter_FOUND)
    annulus_note(TORCH "no python3: no PyTorch operators")
  elseif(NOT torch)
    annulus_note(TORCH "${Python_EXECUTABLE} has no torch: no PyTorch operators")
  else()
    list(GET torch 0 torch_version)
    list(GET torch 1 ANNULUS_TORCH_DIR)
    if(torch_version VERSION_LESS 2.10)
      annulus_note(TORCH "torch ${torch_version} is too old (2.10 is needed): no PyTorch operators")
    else()
      set(found ON)
      add_library(annulus_torch INTERFACE)
      target_include_directories(annulus_torch SYSTEM INTERFACE
        ${ANNULUS_TORCH_DIR}/include ${ANNULUS_TORCH_DIR}/include/torch/csrc/api/include)
      annulus_note(TORCH "torch ${torch_version} of ${Python_EXECUTABLE}")
    endif()
  endif()
endif()
annulus_found(TORCH "pip install 'torch>=2.10' for the python3 that CMake finds")

# --- what the build is, for annulus info ---------------------------------------------------------
set(ANNULUS_COMMIT "" CACHE STRING "Commit of sources that travelled without their history (scripts/gpu)")
mark_as_advanced(ANNULUS_COMMIT)
set(ANNULUS_COMMIT_STRING ${ANNULUS_COMMIT})
find_package(Git QUIET)
if(Git_FOUND AND EXISTS ${PROJECT_SOURCE_DIR}/.git)
  macro(annulus_ask_git out)
    execute_process(COMMAND ${GIT_EXECUTABLE} rev-parse ${ARGN} WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
      OUTPUT_VARIABLE ${out} ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endmacro()
  annulus_ask_git(commit --short HEAD)
  if(NOT ANNULUS_COMMIT_STRING)
    set(ANNULUS_COMMIT_STRING ${commit})
  endif()
  # A new commit configures again, so that a benchmark row never names an old one.
  annulus_ask_git(head_log --path-format=absolute --git-path logs/HEAD)
  if(EXISTS "${head_log}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${head_log})
  endif()
endif()
if(NOT ANNULUS_COMMIT_STRING)
  set(ANNULUS_COMMIT_STRING "unknown")
endif()

# Gives one source file the strings it reports; called where that file's target is made.
function(annulus_describe_build source)
  set_property(SOURCE ${source} APPEND PROPERTY COMPILE_DEFINITIONS
    "ANNULUS_VERSION_STRING=\"${PROJECT_VERSION}\""
    "ANNULUS_COMMIT_STRING=\"${ANNULUS_COMMIT_STRING}\""
    "ANNULUS_CUDA_STRING=\"${ANNULUS_CUDA_STRING}\""
    "ANNULUS_HWY_STRING=\"${ANNULUS_HWY_STRING}\""
    "ANNULUS_BLAS_STRING=\"${ANNULUS_BLAS_STRING}\""
    "ANNULUS_OPENMP_STRING=\"${ANNULUS_OPENMP_STRING}\"")
endfunction()

function(annulus_print_summary)
  message(STATUS "Annulus ${PROJECT_VERSION} (${ANNULUS_COMMIT_STRING}), ${CMAKE_BUILD_TYPE}, "
    "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}, ${CMAKE_SYSTEM_PROCESSOR}")
  get_property(lines GLOBAL PROPERTY ANNULUS_SUMMARY)
  foreach(line ${lines})
    string(REGEX MATCH "^([^|]*)\\|(.*)$" _ "${line}")
    string(SUBSTRING "${CMAKE_MATCH_1}          " 0 10 name)
    message(STATUS "  ${name}${CMAKE_MATCH_2}")
  endforeach()
  if(ANNULUS_SANITIZE)
    message(STATUS "  sanitize  ${ANNULUS_SANITIZE}")
  endif()
endfunction()
