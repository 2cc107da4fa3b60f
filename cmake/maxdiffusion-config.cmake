# find_package(maxdiffusion): the target maxdiffusion::maxdiffusion.
include(${CMAKE_CURRENT_LIST_DIR}/dependencies.cmake)
include(${CMAKE_CURRENT_LIST_DIR}/maxdiffusion-targets.cmake)
