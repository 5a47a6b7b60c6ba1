mlpo_test(doctor_test LIBS mlpo_doctor SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/doctor_test.cc)
