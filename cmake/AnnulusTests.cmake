# annulus_gtest(TARGET TIMEOUT SECONDS LABEL LABEL [ALSO LABEL...] [PROCESSORS N]): registers a GoogleTest program with CTest, a test of
# CTest for each of its own, under a label that `ctest -L` and scripts/test choose by:
#   kernel   what runs kernels of the library, and the runner that judges them
#   parser   what reads files and options
#   page     suites that draw pages and figures
#   large    suites that take most of a machine's memory each, and never run beside another
#   planted  bugs planted in right programs, which the tests must report
#   dist     communicators of threads and their faults, and of GPUs; mpi of processes (annulus/dist/test)
#   compile  what the compiler must refuse (testing/)
#   browser, command   Python programs around the command (set where they are added)
# A program has one label, and those of ALSO for the suites whose names say so. One that measures time takes as many
# PROCESSORS as CTest has jobs, and runs alone.
#
# Under a sanitizer the program runs whole, in a few shards: the leak check at the exit of a process
# takes four seconds on aarch64, which for three hundred processes was a third of the time.
include(GoogleTest)
set(ANNULUS_SANITIZER_SHARDS 4)
set(ANNULUS_SUITES_page "*Page.*:*Figure.*:*Html.*:*Scale.*")
set(ANNULUS_SUITES_large "*Large.*")

function(annulus_gtest target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;LABEL;PROCESSORS" "ALSO")
  # Threads of OpenMP that wait asleep: with several tests at once they would take each other's time.
  set(environment OMP_WAIT_POLICY=passive)
  if(NOT arg_PROCESSORS)
    set(arg_PROCESSORS 1)
  endif()
  set(others)
  foreach(label ${arg_ALSO})
    list(APPEND others ${ANNULUS_SUITES_${label}})
  endforeach()
  list(JOIN others ":" others)
  foreach(label ${arg_LABEL} ${arg_ALSO})
    set(filter "${ANNULUS_SUITES_${label}}")
    if(label STREQUAL arg_LABEL)
      set(filter "-${others}")
    endif()
    if(ANNULUS_SANITIZE)
      set(shards 1)
      if(label STREQUAL arg_LABEL)
        set(shards ${ANNULUS_SANITIZER_SHARDS})
      endif()
      math(EXPR last "${shards} - 1")
      foreach(shard RANGE ${last})
        set(name ${target}.${label}.${shard})
        add_test(NAME ${name} COMMAND ${target} --gtest_brief=1 "--gtest_filter=${filter}")
        set_tests_properties(${name} PROPERTIES TIMEOUT 1800 LABELS ${label} PROCESSORS ${arg_PROCESSORS}
          ENVIRONMENT "${environment};GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${shard}")
      endforeach()
      continue()
    endif()
    set(properties TIMEOUT ${arg_TIMEOUT} LABELS ${label} PROCESSORS ${arg_PROCESSORS} ENVIRONMENT ${environment})
    if(label STREQUAL "large")
      list(APPEND properties RUN_SERIAL ON)
    endif()
    gtest_discover_tests(${target} TEST_FILTER "${filter}" NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60
      PROPERTIES ${properties})
  endforeach()
endfunction()
