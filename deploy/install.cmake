# Run by cmake --install and cpack; CMakeLists.txt beside it puts the folders in between @ signs.
set(prefix "${CMAKE_INSTALL_PREFIX}")
set(bindir "${prefix}/@CMAKE_INSTALL_BINDIR@")
set(sharedir "${prefix}/@CMAKE_INSTALL_DATADIR@/mlpo")
set(libexecdir "${prefix}/@CMAKE_INSTALL_LIBEXECDIR@/mlpo")
set(sysconfdir "${prefix}/etc")
if(prefix STREQUAL "/usr")
  set(sysconfdir /etc)
endif()
set(made "@CMAKE_CURRENT_BINARY_DIR@/installed")

file(READ "@CMAKE_CURRENT_SOURCE_DIR@/systemd/common.in" common)
foreach(unit mlpo-daemon.service mlpo-daemon@.service)
  configure_file("@CMAKE_CURRENT_SOURCE_DIR@/systemd/${unit}.in" "${made}/${unit}" @ONLY)
  file(INSTALL "${made}/${unit}" DESTINATION "${prefix}/lib/systemd/system")
endforeach()
file(INSTALL "@CMAKE_CURRENT_SOURCE_DIR@/systemd/sysusers.conf" DESTINATION "${prefix}/lib/sysusers.d"
     RENAME mlpo.conf)
file(INSTALL "@CMAKE_CURRENT_SOURCE_DIR@/systemd/tmpfiles.conf" DESTINATION "${prefix}/lib/tmpfiles.d"
     RENAME mlpo.conf)

# What batch systems run: mlpo-job does it, the rest calls it as each of them wants.
configure_file("@CMAKE_CURRENT_SOURCE_DIR@/jobs/mlpo-job.in" "${made}/mlpo-job" @ONLY)
file(INSTALL "${made}/mlpo-job" DESTINATION "${libexecdir}" USE_SOURCE_PERMISSIONS)
foreach(script prolog epilog)
  configure_file("@CMAKE_CURRENT_SOURCE_DIR@/slurm/${script}.in" "${made}/${script}" @ONLY)
  file(INSTALL "${made}/${script}" DESTINATION "${sharedir}/slurm" USE_SOURCE_PERMISSIONS)
endforeach()
file(INSTALL "@CMAKE_CURRENT_SOURCE_DIR@/slurm/task_prolog" DESTINATION "${sharedir}/slurm" USE_SOURCE_PERMISSIONS)
configure_file("@CMAKE_CURRENT_SOURCE_DIR@/pbs/mlpo_hook.py.in" "${made}/mlpo_hook.py" @ONLY)
file(INSTALL "${made}/mlpo_hook.py" DESTINATION "${sharedir}/pbs")

# The administrator's own stays.
file(INSTALL "@CMAKE_CURRENT_SOURCE_DIR@/config/mlpo.toml" DESTINATION "${sharedir}")
if(NOT EXISTS "$ENV{DESTDIR}${sysconfdir}/mlpo/mlpo.toml")
  file(INSTALL "@CMAKE_CURRENT_SOURCE_DIR@/config/mlpo.toml" DESTINATION "${sysconfdir}/mlpo")
endif()
