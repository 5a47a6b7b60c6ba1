# The wiring: what workers do to blocks, on real files.
mlpo_test(block_integrity_test TIMEOUT 3600 LIBS mlpo_daemon
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/block_integrity_test.cc)
