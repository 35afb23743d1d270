# TESSERA_LIBSTDCXX: the shared libstdc++, the one that torch's libraries use; unset where the system is not
# Linux. A copy linked in statically has locales of its own, and text that one of the two has begun to write
# ends in a crash in the other. Some compilers are set up to link it statically (LDFLAGS, their specs); then
# the shared library, named before what the driver adds, leaves nothing for the archive to resolve.
#
# Included by kernels/ and cpp_server/, after project().
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
  foreach(flags CMAKE_CXX_FLAGS CMAKE_SHARED_LINKER_FLAGS CMAKE_EXE_LINKER_FLAGS)
    string(REGEX REPLACE "-static-(libstdc\\+\\+|libgcc)" "" ${flags} "${${flags}}")
  endforeach()
  foreach(name libstdc++.so.6 libstdc++.so)
    if(NOT TESSERA_LIBSTDCXX)
      execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-file-name=${name}
                      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(IS_ABSOLUTE "${found}" AND EXISTS "${found}")
        set(TESSERA_LIBSTDCXX "${found}")
      endif()
    endif()
  endforeach()
  if(NOT TESSERA_LIBSTDCXX)
    message(FATAL_ERROR "${CMAKE_CXX_COMPILER} has no shared libstdc++, which torch's libraries use; "
                        "install libstdc++ for this compiler, or choose another with CXX")
  endif()
endif()
