# The wiring: what workers do to blocks, on real files.
mlpo_test(block_integrity_test TIMEOUT 3600 LIBS mlpo_daemon
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/block_integrity_test.cc)
mlpo_test(part_manifest_test LIBS mlpo_daemon mlpo_fake_tier
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/part_manifest_test.cc)
mlpo_test(plan_test LIBS mlpo_daemon SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/plan_test.cc)
mlpo_test(left_file_test LIBS mlpo_daemon
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/left_file_test.cc)
