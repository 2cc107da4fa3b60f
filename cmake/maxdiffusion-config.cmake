# find_package(maxdiffusion): the target maxdiffusion::maxdiffusion.
include(${CMAKE_CURRENT_LIST_DIR}/dependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/maxdiffusion-targets.cmake)
# A program opens libraries of ours by name and finds wheels by a file next to them: both where its run path leads.
cmake_path(SET md_parts NORMALIZE ${CMAKE_CURRENT_LIST_DIR}/../../maxdiffusion)
set_property(TARGET maxdiffusion::maxdiffusion APPEND PROPERTY INTERFACE_LINK_OPTIONS "LINKER:-rpath,${md_parts}")
unset(md_parts)
