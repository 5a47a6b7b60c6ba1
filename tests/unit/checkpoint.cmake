find_package(nlohmann_json REQUIRED)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
mlpo_test(checkpoint_test LIBS mlpo_checkpoint nlohmann_json::nlohmann_json PkgConfig::XXHASH SOURCES
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_files_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_journal_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_kills_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_manifest_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_part_set_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_reader_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_restore_plan_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_shard_runs_test.cc
  ${CMAKE_CURRENT_SOURCE_DIR}/unit/checkpoint_writer_test.cc)
