# TIMEOUT 3600: their long forms (MLPO_LONG=1).
add_library(mlpo_fake_tier STATIC ${CMAKE_CURRENT_SOURCE_DIR}/support/fake_tier.cc
                                  ${CMAKE_CURRENT_SOURCE_DIR}/support/simulated_path.cc
                                  ${CMAKE_CURRENT_SOURCE_DIR}/support/simulated_training.cc)
target_link_libraries(mlpo_fake_tier PUBLIC mlpo_scheduler)
if(MLPO_SANITIZE STREQUAL "thread")  # these have one thread
  return()
endif()
mlpo_test(scheduler_test LIBS mlpo_fake_tier SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_buffers_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_grads_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_integrity_test.cc)
mlpo_test(scheduler_health_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_health_test.cc)
mlpo_test(scheduler_leave_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_leave_test.cc)
mlpo_test(scheduler_quota_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_quota_test.cc)
mlpo_test(scheduler_objects_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_objects_test.cc)
mlpo_test(scheduler_hung_restores_test LIBS mlpo_fake_tier
  SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_hung_restores_test.cc)
mlpo_test(scheduler_tier_test LIBS mlpo_fake_tier SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_tier_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_hang_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_turn_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_fairness_test.cc)
if(NOT MLPO_SANITIZE)  # it measures time
  mlpo_test(scheduler_cost_test TIMEOUT 3600 LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_cost_test.cc)
endif()
mlpo_test(scheduler_properties_test TIMEOUT 3600 LIBS mlpo_fake_tier
  SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_properties_test.cc)
mlpo_test(block_layout_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/block_layout_test.cc)
mlpo_test(window_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/window_test.cc)
mlpo_test(scheduler_limit_test TIMEOUT 3600 LIBS mlpo_fake_tier
  SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_limit_test.cc)
mlpo_test(placement_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/placement_test.cc)
mlpo_test(path_health_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/path_health_test.cc)
mlpo_test(node_split_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/node_split_test.cc)
mlpo_test(path_model_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/path_model_test.cc)
mlpo_test(step_record_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/step_record_test.cc)
mlpo_test(calibration_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/calibration_test.cc)
mlpo_test(scheduler_speeds_test LIBS mlpo_fake_tier SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_speeds_test.cc)
mlpo_test(scheduler_saves_test LIBS mlpo_fake_tier SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_saves_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_handover_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_stuck_saves_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/scheduler_restore_test.cc)
mlpo_test(copy_pace_test LIBS mlpo_scheduler SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/copy_pace_test.cc)
