mlpo_test(proto_layout_test LIBS mlpo_client_static
          SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto_layout_test.cc ${CMAKE_CURRENT_SOURCE_DIR}/unit/proto_layout_c.c)
target_compile_definitions(proto_layout_test PRIVATE MLPO_FORMAT_FILE="${PROJECT_SOURCE_DIR}/proto/FORMAT.md")
mlpo_test(ring_cursors_test SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/ring_cursors_test.cc)
mlpo_test(ring_model_test SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/unit/ring_model_test.cc
                                  ${CMAKE_CURRENT_SOURCE_DIR}/support/weak_memory.cc)

# What programs link: symbols, versions, and that C needs nothing of C++.
add_test(NAME client_library_test
         COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/unit/client_library_test.sh ${CMAKE_C_COMPILER}
                 $<TARGET_FILE:mlpo_client> $<TARGET_FILE:mlpo_client_static> ${PROJECT_SOURCE_DIR}
                 "${MLPO_SANITIZE}")
