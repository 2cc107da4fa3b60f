# `cmake --install`: the program, the modules as static libraries, the headers that maxdiffusion/maxdiffusion.h
# promises, and the package that find_package(maxdiffusion) finds. The wheels stay where the build has them (MD_DEPS).
include(CMakePackageConfigHelpers)
set(package ${CMAKE_INSTALL_LIBDIR}/cmake/maxdiffusion)

get_property(modules GLOBAL PROPERTY MD_MODULES)
add_library(md_all INTERFACE)
target_compile_features(md_all INTERFACE cxx_std_20)
target_link_libraries(md_all INTERFACE ${modules})
set_target_properties(md_all PROPERTIES EXPORT_NAME maxdiffusion)

install(TARGETS maxdiffusion)
install(TARGETS md_all ${modules} EXPORT maxdiffusion ARCHIVE DESTINATION ${MD_PARTS_FOLDER})
install(TARGETS md_arrow md_http md_listen md_mpi md_remote md_video LIBRARY DESTINATION ${MD_PARTS_FOLDER})
install(FILES ${CMAKE_BINARY_DIR}/wheels.path DESTINATION ${MD_PARTS_FOLDER})
foreach(library libarrow libarrow_s3 libparquet)
  install(CODE "file(CREATE_LINK ${MD_DEPS}/pyarrow/${library}.so.2600
                \$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${MD_PARTS_FOLDER}/${library}.so.2600 SYMBOLIC)")
endforeach()
install(DIRECTORY configs DESTINATION ${CMAKE_INSTALL_DATADIR}/maxdiffusion)
install(FILES apps/completion/maxdiffusion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions
        RENAME maxdiffusion)
install(FILES apps/completion/_maxdiffusion DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(EXPORT maxdiffusion NAMESPACE maxdiffusion:: FILE maxdiffusion-targets.cmake DESTINATION ${package})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/maxdiffusion-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/maxdiffusion-config-version.cmake cmake/maxdiffusion-config.cmake
              cmake/dependencies.cmake DESTINATION ${package})
install(CODE "set(source ${CMAKE_SOURCE_DIR})\nset(include ${CMAKE_INSTALL_INCLUDEDIR})")
install(SCRIPT cmake/install_headers.cmake)
