# annulus_gtest(TARGET TIMEOUT SECONDS [SERIAL FILTER]): registers a GoogleTest program with CTest, a
# test of CTest for each of its own. SERIAL names suites that take most of a machine's memory each and
# never run beside another.
#
# Under a sanitizer the program runs whole, in a few shards: the leak check at the exit of a process
# takes four seconds on aarch64, which for three hundred processes was a third of the time.
include(GoogleTest)
set(ANNULUS_SANITIZER_SHARDS 4)

function(annulus_gtest target)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "TIMEOUT;SERIAL" "")
  if(ANNULUS_SANITIZE)
    math(EXPR last "${ANNULUS_SANITIZER_SHARDS} - 1")
    foreach(shard RANGE ${last})
      add_test(NAME ${target}.${shard} COMMAND ${target} --gtest_brief=1)
      set_tests_properties(${target}.${shard} PROPERTIES TIMEOUT 1800
        ENVIRONMENT "GTEST_TOTAL_SHARDS=${ANNULUS_SANITIZER_SHARDS};GTEST_SHARD_INDEX=${shard}")
    endforeach()
    return()
  endif()
  set(common NO_PRETTY_VALUES DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT ${arg_TIMEOUT})
  if(NOT arg_SERIAL)
    gtest_discover_tests(${target} ${common})
    return()
  endif()
  gtest_discover_tests(${target} TEST_FILTER "-${arg_SERIAL}" ${common})
  gtest_discover_tests(${target} TEST_FILTER "${arg_SERIAL}" ${common} RUN_SERIAL ON)
endfunction()
