# Gradients and parameters between streams and a real daemon, on the stand-in for the CUDA runtime. 10^5 rounds with
# MLPO_LONG=1.
if(NOT TARGET mlpo_cuda)
  return()
endif()
add_executable(cuda_rounds ${CMAKE_CURRENT_SOURCE_DIR}/stress/cuda_rounds.cc)
target_link_libraries(cuda_rounds PRIVATE fake_cudart mlpo_cuda mlpo_daemon_process)
if(MLPO_SANITIZE)
  add_test(NAME cuda_rounds COMMAND cuda_rounds 60)
else()
  add_test(NAME cuda_rounds COMMAND cuda_rounds)
endif()
set_tests_properties(cuda_rounds PROPERTIES TIMEOUT 3600 LABELS stress)
# That it sees what it looks for: without the order of gradients behind parameters bytes must be wrong (or, earlier, the
# sanitizer sees that two streams touch them).
add_test(NAME cuda_rounds_notices COMMAND cuda_rounds 100 --break)
set_tests_properties(cuda_rounds_notices PROPERTIES PASS_REGULAR_EXPRESSION "WRONG BYTES|ThreadSanitizer: data race"
                     TIMEOUT 300 LABELS stress)
