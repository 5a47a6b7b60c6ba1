# Lost wake-ups: 10^6 operations of each kind, 10^8 with MLPO_LONG=1. Under a sanitizer fewer: it is the races that count.
add_executable(ring_wakeup ${CMAKE_CURRENT_SOURCE_DIR}/stress/ring_wakeup.cc)
target_link_libraries(ring_wakeup PRIVATE mlpo_client_static mlpo_fake_daemon)
if(MLPO_SANITIZE)
  add_test(NAME ring_wakeup COMMAND ring_wakeup 100000)
else()
  add_test(NAME ring_wakeup COMMAND ring_wakeup)
endif()
set_tests_properties(ring_wakeup PROPERTIES TIMEOUT 3600 LABELS stress)
# That the test sees what it looks for: an end that does not look again after its announcement must stall.
add_test(NAME ring_wakeup_notices COMMAND ring_wakeup --break)
set_tests_properties(ring_wakeup_notices PROPERTIES PASS_REGULAR_EXPRESSION "STALLED" TIMEOUT 300 LABELS stress)
