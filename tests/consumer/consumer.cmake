# Installs the build into a folder of its own, builds examples/ against that as an outside project would, and runs what
# was built and what was installed.
# Given by ctest: SOURCE (the root of the repository), BUILD (its folder), VERSION, COMPILER, FLAGS.
set(prefix ${BUILD}/consumer/prefix)
set(project ${BUILD}/consumer/build)
file(REMOVE_RECURSE ${BUILD}/consumer)
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} ccache)
find_program(CCACHE ccache)
if(NOT CCACHE)
  unset(ENV{CMAKE_CXX_COMPILER_LAUNCHER})
endif()
function(run)
  execute_process(COMMAND ${ARGN} OUTPUT_VARIABLE out ERROR_VARIABLE out COMMAND_ECHO STDOUT RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${out}")
  endif()
  set(out "${out}" PARENT_SCOPE)
endfunction()
function(expect text)
  if(NOT out STREQUAL "${text}\n")
    message(FATAL_ERROR "found '${out}', expected '${text}'")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${prefix})
run(${CMAKE_COMMAND} -S ${SOURCE}/examples -B ${project} -G Ninja -DCMAKE_BUILD_TYPE=Release
    -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_CXX_FLAGS=${FLAGS})
run(${CMAKE_COMMAND} --build ${project})
run(${project}/train_your_own ${BUILD}/consumer/run)
if(NOT out MATCHES "after 3000 steps: y\\(0.5\\) = (0.9[5-9]|1.0[0-5]), sin\\(1.5\\) = 1.00")
  message(FATAL_ERROR "found '${out}'")
endif()
run(${CMAKE_COMMAND} -E chdir ${BUILD}/consumer ${project}/generate ${SOURCE}/tests/golden/pipelines/sd 32 "a red cat" "a dog")
if(NOT out MATCHES "image_0.png: a red cat\nimage_1.png: a dog" OR NOT EXISTS ${BUILD}/consumer/image_1.png)
  message(FATAL_ERROR "found '${out}'")
endif()
run(${prefix}/bin/maxdiffusion --version)
expect("maxdiffusion ${VERSION}")

# It opens the libraries that were installed with it, not those of the build.
set(ENV{LD_DEBUG} files)
run(${prefix}/bin/maxdiffusion prepare_tfrecords ${SOURCE}/configs/base15.yml tfrecords_dir=${BUILD}/consumer/records
    dataset_name= hf_train_files=${SOURCE}/tests/golden/data/files/plain.parquet image_column=picture
    caption_column=captions cache_latents_text_encoder_outputs=false)
if(NOT out MATCHES "calling init: [^\n]*/consumer/prefix/[^\n]*/md_arrow.so")
  message(FATAL_ERROR "the installed md_arrow.so was not opened")
endif()
