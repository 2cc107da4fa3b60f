# One static library per module, named md_<module>; sources and tests are globbed in all of its folders, so a new file
# needs no edit here. md_module(<module> [USES modules] [EXCLUDE folders] [LIBRARIES libraries]): USES are the modules it
# may include, and must agree with the table in docs/design.md; sources in the folders of EXCLUDE belong to other targets.
include(cmake/dependencies.cmake)
find_package(GTest REQUIRED)
# Where libraries lie that the program opens by name, below the prefix that it is installed to.
set(MD_PARTS_FOLDER ${CMAKE_INSTALL_LIBDIR}/maxdiffusion)

# Programs that tests compile are shared by the tests of one run of ctest, whichever executable they are in: a cache that
# each run empties first. A warm cache hides nothing: its keys hold the whole text of the program and all else that the
# compiler reads, so a program that changed is compiled. Tests of the cache itself have folders of their own.
set(test_cache ${CMAKE_BINARY_DIR}/test_cache)
add_test(NAME empty_test_cache COMMAND ${CMAKE_COMMAND} -E rm -rf ${test_cache})
set_tests_properties(empty_test_cache PROPERTIES FIXTURES_SETUP test_cache)
add_custom_target(quick_tests)

# md_ctest(<name> <command and its words>... [LABELS labels] [COST seconds] [ENVIRONMENT variables]): an entry of ctest.
function(md_ctest name)
  cmake_parse_arguments(ARG "" "COST" "LABELS;ENVIRONMENT" ${ARGN})
  list(APPEND ARG_ENVIRONMENT XDG_CACHE_HOME=${test_cache} HF_HUB_OFFLINE=1)
  add_test(NAME ${name} COMMAND ${ARG_UNPARSED_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES FIXTURES_REQUIRED test_cache LABELS "${ARG_LABELS}"
                       ENVIRONMENT "${ARG_ENVIRONMENT}")
  if(ARG_COST)
    set_tests_properties(${name} PROPERTIES COST ${ARG_COST})
  endif()
endfunction()

# Names one test program to ctest. It gets the label `device` where it opens a plugin: where its sources include a
# module that does, or DEVICE is given. QUICK: which of its tests `./run test quick` runs, as --gtest_filter takes them;
# unless these are all, they are an entry of their own. SHARDS: how many entries the other tests are dealt to, which run
# side by side. COST: seconds that the longest of these takes alone; entries that cost most start first.
# PLAIN_PROGRAMS: the CPU plugin compiles without optimizing and with its older emitters, in a third of the time; QUICK
# and whatever opens another plugin is without these flags.
# Tests are compiled with little optimization: they wait for the compiler or the plugin, not for themselves.
# Headers that nearly all of them include are compiled once, for all; a test includes what it uses all the same.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/test_headers.cc CONTENT "")
add_executable(test_headers ${CMAKE_BINARY_DIR}/test_headers.cc)
target_link_libraries(test_headers PRIVATE GTest::gtest_main fmt::fmt)
target_compile_options(test_headers PRIVATE $<$<CONFIG:Release>:-O0>)
target_precompile_headers(test_headers PRIVATE <algorithm> <cmath> <cstring> <filesystem> <functional> <map> <memory>
                          <optional> <random> <set> <sstream> <string> <vector> <gtest/gtest.h> <fmt/format.h>)
function(md_add_test name target)
  cmake_parse_arguments(ARG "DEVICE;PLAIN_PROGRAMS" "QUICK;SHARDS;COST" "SOURCES;USES;LABELS" ${ARGN})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O0>)
  target_precompile_headers(${target} REUSE_FROM test_headers)
  set(labels ${ARG_LABELS})
  foreach(source ${ARG_SOURCES})
    file(STRINGS ${source} opens_plugin REGEX "#include \"(maxdiffusion/(pjrt|runtime|encoders|pipelines|train|settings|run|convert|commands)|tests/one_device)")
    if(opens_plugin OR ARG_DEVICE)
      list(APPEND labels device)
    endif()
  endforeach()
  list(REMOVE_DUPLICATES labels)
  set(environment)
  if(ARG_PLAIN_PROGRAMS)
    set(environment "XLA_FLAGS=--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
  endif()
  if(ARG_QUICK)
    add_dependencies(quick_tests ${target})
    if(ARG_QUICK STREQUAL "*")
      md_ctest(${name} ${target} LABELS ${labels} quick)
      return()
    endif()
    md_ctest(${name}.quick ${target} LABELS ${labels} quick ENVIRONMENT GTEST_FILTER=${ARG_QUICK})
    list(APPEND environment GTEST_FILTER=-${ARG_QUICK})
  endif()
  if(NOT ARG_SHARDS)
    md_ctest(${name} ${target} LABELS ${labels} COST ${ARG_COST} ENVIRONMENT ${environment})
    return()
  endif()
  foreach(shard RANGE 1 ${ARG_SHARDS})
    math(EXPR index "${shard} - 1")
    md_ctest(${name}.${shard} ${target} LABELS ${labels} COST ${ARG_COST}
             ENVIRONMENT ${environment} GTEST_TOTAL_SHARDS=${ARG_SHARDS} GTEST_SHARD_INDEX=${index})
  endforeach()
endfunction()

# MD_UNITY: sources of a module are compiled several at a time, in less than half of the time; ./run does so. What cannot be
# joined stands alone: files that use a name of their own for what another calls so, and those with options of their own.
option(MD_UNITY "compile the sources of a module several at a time" OFF)
set(alone checkpoint/shard_files data/folders/toml_text checkpoint/remote_checkpoints checkpoint/safetensors_writer
          ops/attention_tiles ops/dot pjrt/profiler probes/plugin_probe processes/rendezvous storage/hub storage/remote_sync
          tasks/replay tokenizers/t5_tokenizer)
# A member of a family names what it registers as its neighbours do; these are what members share.
file(GLOB members maxdiffusion/pjrt/platform_*.cc maxdiffusion/kernels/*.cc maxdiffusion/pipelines/guidance/*.cc
     maxdiffusion/models/*.cc maxdiffusion/families/*.cc)
set(shared families/clip_encoder families/family families/learned_embeddings families/loras families/model_weights
           families/open_model families/record_format families/reference_conventions families/wan_ratios
           models/autoencoder models/clip_encoder models/clip_text models/clip_vision models/config_reader
           models/controlnet models/decoder_transformer models/flux_weight_names models/ip_adapter models/joint_blocks
           models/latent_colours models/latent_patches models/latent_scale models/registry models/resnet_block
           models/step_reuse models/t2i_adapter models/t5 models/tiny_vae models/transformer2d models/unet2d
           models/unet2d_config)
foreach(list alone shared)
  list(TRANSFORM ${list} REPLACE "(.+)" "${CMAKE_SOURCE_DIR}/maxdiffusion/\\1.cc")
endforeach()
list(REMOVE_ITEM members ${shared})
set_source_files_properties(${alone} ${members} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)

function(md_module name)
  cmake_parse_arguments(ARG "" "" "USES;EXCLUDE;LIBRARIES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/maxdiffusion/${name}/*.cc)
  file(GLOB_RECURSE protos CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/maxdiffusion/${name}/*.proto)
  foreach(folder ${ARG_EXCLUDE})
    list(FILTER sources EXCLUDE REGEX "/maxdiffusion/${name}/${folder}/")
  endforeach()
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "_test\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")
  list(TRANSFORM ARG_USES PREPEND "md_" OUTPUT_VARIABLE uses)
  set(root $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(sources)
    add_library(md_${name} STATIC ${sources})
    target_include_directories(md_${name} PUBLIC ${root})
    target_link_libraries(md_${name} PUBLIC ${uses} ${ARG_LIBRARIES} fmt::fmt nlohmann_json::nlohmann_json Threads::Threads)
  else()
    add_library(md_${name} INTERFACE)
    target_include_directories(md_${name} INTERFACE ${root})
    target_link_libraries(md_${name} INTERFACE ${uses} ${ARG_LIBRARIES} fmt::fmt nlohmann_json::nlohmann_json)
  endif()
  set_target_properties(md_${name} PROPERTIES EXPORT_NAME ${name})
  set_property(GLOBAL APPEND PROPERTY MD_MODULES md_${name})
  if(sources AND MD_UNITY)
    set_target_properties(md_${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
  endif()
  if(protos)
    # "maxdiffusion/<module>/<name>.pb.h"; generated code is kept out of our warnings.
    set(generated ${CMAKE_BINARY_DIR}/generated)
    file(MAKE_DIRECTORY ${generated})
    protobuf_generate(TARGET md_${name} LANGUAGE cpp PROTOS ${protos} IMPORT_DIRS ${CMAKE_SOURCE_DIR}
                      PROTOC_OUT_DIR ${generated})
    target_include_directories(md_${name} SYSTEM PRIVATE ${generated})
    foreach(proto ${protos})
      file(RELATIVE_PATH proto ${CMAKE_SOURCE_DIR} ${proto})
      string(REPLACE .proto .pb.cc source ${generated}/${proto})
      set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endforeach()
  endif()
  if(tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE md_${name} GTest::gtest_main)
    target_compile_definitions(${name}_test PRIVATE MD_SOURCE_DIR="${CMAKE_SOURCE_DIR}" MD_DEPS_DIR="${MD_DEPS}")
    md_add_test(${name} ${name}_test QUICK * SOURCES ${tests})
  endif()
endfunction()

# A test program over several modules, tests/<name>/*.cc; the other words are those of md_add_test.
function(md_tests name)
  cmake_parse_arguments(ARG "DEVICE;PLAIN_PROGRAMS" "QUICK;SHARDS;COST" "USES;LABELS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/${name}/*.cc)
  if(NOT sources)
    return()
  endif()
  list(TRANSFORM ARG_USES PREPEND "md_" OUTPUT_VARIABLE uses)
  add_executable(${name}_tests ${sources})
  target_link_libraries(${name}_tests PRIVATE ${uses} GTest::gtest_main)
  target_compile_definitions(${name}_tests PRIVATE MD_SOURCE_DIR="${CMAKE_SOURCE_DIR}" MD_DEPS_DIR="${MD_DEPS}"
                             MD_BINARY_DIR="${CMAKE_BINARY_DIR}")
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/${name}/*.h)
  md_add_test(tests.${name} ${name}_tests ${ARGN} SOURCES ${sources} ${headers})
endfunction()

# A timed program, bench/<name>.cc; built where Google Benchmark is installed, never a test.
find_package(benchmark QUIET)
function(md_bench name)
  cmake_parse_arguments(ARG "" "" "USES;LIBRARIES" ${ARGN})
  if(NOT benchmark_FOUND OR NOT EXISTS ${CMAKE_SOURCE_DIR}/bench/${name}.cc)
    return()
  endif()
  list(TRANSFORM ARG_USES PREPEND "md_" OUTPUT_VARIABLE uses)
  add_executable(${name} ${CMAKE_SOURCE_DIR}/bench/${name}.cc)
  target_link_libraries(${name} PRIVATE ${uses} ${ARG_LIBRARIES} benchmark::benchmark)
  target_compile_definitions(${name} PRIVATE MD_SOURCE_DIR="${CMAKE_SOURCE_DIR}" MD_DEPS_DIR="${MD_DEPS}")
endfunction()

# A program that packages hold, in bin/ or libexec/: it finds its libraries from its own place, and has what they call of
# newer C libraries. RPATH, not RUNPATH: it leads the libraries' own libraries as well.
function(md_packaged program)
  target_sources(${program} PRIVATE ${CMAKE_SOURCE_DIR}/apps/older_libc.cc)
  file(RELATIVE_PATH parts /${CMAKE_INSTALL_BINDIR} /${MD_PARTS_FOLDER})
  set_target_properties(${program} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN/${parts}")
  target_link_options(${program} PRIVATE LINKER:--disable-new-dtags LINKER:--export-dynamic-symbol=arc4random)
endfunction()

md_module(base LIBRARIES spdlog::spdlog yaml-cpp PkgConfig::XXHASH ${CMAKE_DL_LIBS})
set_source_files_properties(${CMAKE_SOURCE_DIR}/maxdiffusion/base/version.cc PROPERTIES
                            COMPILE_DEFINITIONS MD_VERSION="${PROJECT_VERSION}")
md_module(graph USES base)
md_module(tiles USES graph)
md_module(mesh USES base LIBRARIES yaml-cpp)
md_module(config USES base LIBRARIES yaml-cpp)
md_module(storage USES base EXCLUDE http remote LIBRARIES ${CMAKE_DL_LIBS})
md_module(processes USES base EXCLUDE mpi LIBRARIES ${CMAKE_DL_LIBS})
md_module(pjrt USES base LIBRARIES dl protobuf::libprotobuf)
# Where programs of this build find wheels (base/installation.h). No file that is compiled knows, so that other
# checkouts find all objects in ccache and a package has no path of the machine that made it.
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/wheels.path CONTENT "${MD_DEPS}\n")
target_include_directories(md_pjrt SYSTEM PRIVATE ${MD_DEPS}/xla_plugins/xla_cpu_pjrt/include)
# Libraries that tests open: a plugin too old, no plugin at all, CPU plugins with a profiler, with clients of several
# processes, and that throw.
foreach(library old_api not_a_plugin profiling several_processes hanging aborting throwing)
  add_library(${library} MODULE ${CMAKE_SOURCE_DIR}/tests/plugins/${library}.cc)
  target_include_directories(${library} SYSTEM PRIVATE ${MD_DEPS}/xla_plugins/xla_cpu_pjrt/include)
  target_include_directories(${library} PRIVATE ${CMAKE_SOURCE_DIR})
  set_target_properties(${library} PROPERTIES PREFIX "" LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/test_plugins)
  add_dependencies(pjrt_test ${library})
endforeach()
target_compile_definitions(profiling PRIVATE MD_DEPS_DIR="${MD_DEPS}")
target_compile_definitions(throwing PRIVATE MD_DEPS_DIR="${MD_DEPS}")
target_compile_definitions(several_processes PRIVATE MD_DEPS_DIR="${MD_DEPS}")
target_compile_definitions(pjrt_test PRIVATE MD_TEST_PLUGINS="${CMAKE_BINARY_DIR}/test_plugins")
target_include_directories(pjrt_test SYSTEM PRIVATE ${MD_DEPS}/jaxlib/include ${CMAKE_BINARY_DIR}/generated)
md_module(kernels USES processes LIBRARIES dnnl gomp)
# Loops over floats become vector code: no errno, no traps, sums in lanes where a pragma says so.
target_compile_options(md_kernels PRIVATE -fno-math-errno -fno-trapping-math -fopenmp-simd)
target_include_directories(md_kernels SYSTEM PRIVATE ${MD_DEPS}/jaxlib/include)
if(MD_SANITIZE STREQUAL thread)
  # The plugin orders what its threads hand to kernels, which the sanitizer does not see: it would look up each access in
  # its list of exceptions, and a test of seconds takes more than an hour. Optimized, because functions of headers that are
  # not inlined here would be linked for other sources too.
  target_compile_options(md_kernels PRIVATE -fno-sanitize=thread -O2)
endif()
md_module(ops USES tiles kernels)
# Random numbers are the same bits on every processor: no product and sum in one rounding.
set_source_files_properties(${CMAKE_SOURCE_DIR}/maxdiffusion/ops/host_random.cc PROPERTIES
                            COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>;-ffp-contract=off;-fno-math-errno;-fno-trapping-math"
                            SKIP_PRECOMPILE_HEADERS ON)
# Loops over weights become vector code, as in kernels/.
set_source_files_properties(${CMAKE_SOURCE_DIR}/maxdiffusion/nn/few_bits.cc PROPERTIES
                            COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>;-fno-math-errno;-fno-trapping-math;-fopenmp-simd"
                            SKIP_PRECOMPILE_HEADERS ON)
md_module(autodiff USES ops)
md_module(runtime USES graph mesh pjrt kernels storage LIBRARIES PkgConfig::XXHASH)
target_include_directories(runtime_test SYSTEM PRIVATE ${MD_DEPS}/jaxlib/include)
# The same on the other CPU plugin; pjrt_test opens both.
md_ctest(runtime.second_plugin runtime_test LABELS device
         ENVIRONMENT "MAXDIFFUSION_PLUGIN_DIR=${MD_DEPS}/xla_plugins/xla_cpu_pjrt")
md_module(nn USES autodiff mesh)
md_module(models USES nn)
md_module(schedulers USES ops)
md_module(optim USES ops)
md_module(media USES storage EXCLUDE libav LIBRARIES PNG::PNG JPEG::JPEG PkgConfig::WEBP PkgConfig::FREETYPE
          PkgConfig::ZLIB)
md_module(tokenizers USES base LIBRARIES PkgConfig::ICU PkgConfig::ZLIB protobuf::libprotobuf)
md_module(data USES mesh media config EXCLUDE records/arrow LIBRARIES PkgConfig::HARFBUZZ protobuf::libprotobuf highwayhash)
# Libraries that are opened when first needed, since what they link is large: md_arrow reads Parquet and Arrow files,
# md_remote reads and writes gs:// and s3:// locations, md_video reads and writes videos, md_http downloads, md_listen
# is the server's HTTP.
pkg_check_modules(HTTP REQUIRED IMPORTED_TARGET libcurl libcrypto)
pkg_check_modules(LIBAV REQUIRED IMPORTED_TARGET libavformat libavcodec libswscale libavutil)
function(md_opened name module folder library)
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/maxdiffusion/${module}/${folder}/*.cc)
  add_library(md_${name} MODULE ${sources} ${CMAKE_SOURCE_DIR}/maxdiffusion/base/error.cc
              ${CMAKE_SOURCE_DIR}/maxdiffusion/base/dtype.cc
              ${CMAKE_SOURCE_DIR}/maxdiffusion/base/nearest.cc
              ${CMAKE_SOURCE_DIR}/maxdiffusion/storage/location.cc)
  target_include_directories(md_${name} PRIVATE ${CMAKE_SOURCE_DIR})
  target_link_libraries(md_${name} PRIVATE fmt::fmt ${library})
  if(NOT MD_SANITIZE)
    target_link_options(md_${name} PRIVATE -Wl,-z,defs)
  endif()
  set_target_properties(md_${name} PROPERTIES PREFIX "")
  add_dependencies(md_${module} md_${name})
endfunction()
md_opened(arrow data records/arrow ${MD_DEPS}/pyarrow/libparquet.so.2600)
md_opened(remote storage remote ${MD_DEPS}/pyarrow/libarrow_s3.so.2600)
md_opened(video media libav PkgConfig::LIBAV)
md_opened(http storage http PkgConfig::HTTP)
foreach(name md_arrow md_remote)
  target_include_directories(${name} SYSTEM PRIVATE ${MD_DEPS}/pyarrow/include)
  target_link_libraries(${name} PRIVATE ${MD_DEPS}/pyarrow/libarrow.so.2600)
  # Arrow's libraries are next to them: links in the build, copies in a package.
  set_target_properties(${name} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
endforeach()
foreach(library libarrow libarrow_s3 libparquet)
  file(CREATE_LINK ${MD_DEPS}/pyarrow/${library}.so.2600 ${CMAKE_BINARY_DIR}/${library}.so.2600 SYMBOLIC)
endforeach()
# The same for processes: md_mpi joins those that an MPI launcher starts.
# Fedora and openSUSE keep it in folders that are no system's default.
file(GLOB mpich_folders /usr/lib64/mpich/lib/pkgconfig /usr/lib64/mpi/gcc/mpich/lib*/pkgconfig)
list(JOIN mpich_folders : mpich_folders)
set(ENV{PKG_CONFIG_PATH} "$ENV{PKG_CONFIG_PATH}:${mpich_folders}")
pkg_check_modules(MPICH REQUIRED IMPORTED_TARGET mpich)
add_library(md_mpi MODULE ${CMAKE_SOURCE_DIR}/maxdiffusion/processes/mpi/library.cc
            ${CMAKE_SOURCE_DIR}/maxdiffusion/base/error.cc)
target_include_directories(md_mpi PRIVATE ${CMAKE_SOURCE_DIR})
target_link_libraries(md_mpi PRIVATE fmt::fmt PkgConfig::MPICH)
set_target_properties(md_mpi PROPERTIES PREFIX "")
add_dependencies(md_processes md_mpi)
# Tests make videos that the program does not write.
target_link_libraries(media_test PRIVATE PkgConfig::LIBAV)
target_link_libraries(data_test PRIVATE PkgConfig::LIBAV)
md_module(checkpoint USES mesh storage)
md_module(lora USES nn checkpoint)
md_module(metrics USES media runtime LIBRARIES protobuf::libprotobuf)
target_include_directories(metrics_test SYSTEM PRIVATE ${CMAKE_BINARY_DIR}/generated)
md_module(model_folder USES models tokenizers checkpoint)
md_module(families USES model_folder media lora)
md_module(encoders USES families runtime)
md_module(tasks USES encoders schedulers data)
md_module(pipelines USES encoders schedulers config)
md_module(train USES tasks optim lora metrics)
md_module(settings USES train pipelines)
md_module(run USES settings)
md_module(convert USES run)
md_module(server USES settings EXCLUDE http)
pkg_check_modules(LISTEN REQUIRED IMPORTED_TARGET cpp-httplib)
md_opened(listen server http PkgConfig::LISTEN)
# The page of the server, as a text of C++.
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/maxdiffusion/server/page.html)
file(READ ${CMAKE_SOURCE_DIR}/maxdiffusion/server/page.html page)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/page_html.inc CONTENT "R\"page(@page@)page\"" @ONLY)
target_include_directories(md_server PRIVATE ${CMAKE_BINARY_DIR}/generated)
md_module(probes USES pjrt kernels storage)
md_module(commands USES convert probes server)
# Modules that trace graphs and arrange runs have no loops worth more: a fifth of the time of compiling them. Headers that
# nearly all of them include are compiled once, for all; a source includes what it uses all the same. The compiler wants
# the same optimization for both.
add_library(module_headers OBJECT ${CMAKE_BINARY_DIR}/test_headers.cc)
target_link_libraries(module_headers PRIVATE spdlog::spdlog fmt::fmt nlohmann_json::nlohmann_json)
target_precompile_headers(module_headers PRIVATE <algorithm> <cmath> <cstring> <filesystem> <functional> <map> <memory>
                          <numeric> <optional> <ranges> <set> <span> <string> <utility> <variant> <vector> <fmt/format.h>
                          <nlohmann/json.hpp>)
set(plain_modules graph tiles mesh config storage processes pjrt ops autodiff nn models schedulers optim tokenizers data checkpoint
                  lora metrics model_folder families encoders tasks pipelines train settings run convert probes
                  server commands)
foreach(module ${plain_modules})
  target_precompile_headers(md_${module} REUSE_FROM module_headers)
endforeach()
list(TRANSFORM plain_modules PREPEND md_)
foreach(target module_headers ${plain_modules})
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
endforeach()
set(loops ${CMAKE_SOURCE_DIR}/maxdiffusion/lora/low_rank.cc)
file(GLOB pixels ${CMAKE_SOURCE_DIR}/maxdiffusion/media/*.cc ${CMAKE_SOURCE_DIR}/maxdiffusion/data/images/*.cc)
list(FILTER pixels EXCLUDE REGEX "_test\\.cc$")
set_source_files_properties(${loops} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O2> SKIP_PRECOMPILE_HEADERS ON)
set_source_files_properties(${pixels} PROPERTIES COMPILE_OPTIONS $<$<CONFIG:Release>:-O3> SKIP_PRECOMPILE_HEADERS ON)
md_tests(ops USES ops autodiff runtime)
md_tests(tiles PLAIN_PROGRAMS USES nn autodiff runtime SHARDS 2 COST 30)
md_tests(kernels_on_device USES pjrt)
add_dependencies(kernels_on_device_tests tiles_tests)
md_tests(kernels USES nn autodiff runtime COST 30)
md_tests(autodiff USES ops autodiff runtime SHARDS 2 COST 20)
# The older emitters round to float8 otherwise.
md_tests(golden PLAIN_PROGRAMS USES models autodiff runtime checkpoint schedulers optim SHARDS 4 COST 40
         QUICK Kinds/QuantizedStack.*:Quantize.*)
md_tests(lora PLAIN_PROGRAMS USES lora models autodiff runtime checkpoint config SHARDS 2 COST 20)
target_sources(lora_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/golden/model_case.cc)
md_tests(schedulers USES schedulers runtime QUICK *)
md_tests(optim USES train)
md_tests(mesh PLAIN_PROGRAMS USES train SHARDS 4 COST 40)
md_tests(faults USES train QUICK *)
md_tests(resume PLAIN_PROGRAMS USES run SHARDS 3 COST 30 QUICK Resume.EqualsNoInterruptionBitForBit)
md_tests(families PLAIN_PROGRAMS USES commands convert QUICK ToyFamily.*:RunConfig.*:ReferenceKeys.*:WanFiles.*:DenoiseTask.*:ReferenceFiles.*:ForeignKeys.*:StepFlops.*)
md_tests(keys DEVICE PLAIN_PROGRAMS USES commands convert SHARDS 4 COST 90 QUICK Keys.*)
add_dependencies(keys_tests profiling)
md_tests(cli DEVICE PLAIN_PROGRAMS USES data SHARDS 6 COST 60
         QUICK Docs*:FreshMachine.*:Program.*:Train.WritesEverythingARunPromises)
# What `maxdiffusion accelerator_check` runs on a device: records compared with the CPU, collectives, random numbers, attention,
# goldens. It starts without the build's folder, with its goldens where MD_TEST_GOLDENS says; no path of the sources is
# in it.
# tools/package.py reads this list: these goldens are packaged.
set(goldens_on_device models_test flux_transformer_test wan_transformer_test qwen_image_test z_image_test decoder_test)
list(TRANSFORM goldens_on_device REPLACE "(.+)" "tests/golden/\\1.cc" OUTPUT_VARIABLE of_other_tests)
list(APPEND of_other_tests tests/autodiff/random_test.cc)
list(JOIN goldens_on_device "|" goldens_on_device)
set(short_paths -fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=)
set_source_files_properties(${of_other_tests} PROPERTIES COMPILE_OPTIONS ${short_paths})
file(GLOB device_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/device/*.cc)
add_executable(device_tests EXCLUDE_FROM_ALL ${device_sources} ${CMAKE_SOURCE_DIR}/tests/golden/model_case.cc
  "$<FILTER:$<TARGET_OBJECTS:golden_tests>,INCLUDE,/(${goldens_on_device}).cc>"
  "$<FILTER:$<TARGET_OBJECTS:autodiff_tests>,INCLUDE,/random_test.cc>")
target_link_libraries(device_tests PRIVATE md_models md_autodiff md_runtime md_checkpoint GTest::gtest_main)
target_compile_options(device_tests PRIVATE $<$<CONFIG:Release>:-O0> ${short_paths})
target_precompile_headers(device_tests REUSE_FROM test_headers)
md_packaged(device_tests)
add_dependencies(cli_tests device_tests random_weights)
add_dependencies(cli_tests profiling old_api not_a_plugin hanging aborting)
md_tests(interop DEVICE USES families media LABELS interop)  # run by `./run test interop` alone
md_tests(configs DEVICE PLAIN_PROGRAMS USES media checkpoint SHARDS 3 COST 80)
md_tests(single_file DEVICE PLAIN_PROGRAMS USES families COST 30)
md_tests(processes DEVICE PLAIN_PROGRAMS USES media ops runtime SHARDS 2 COST 100)
add_dependencies(processes_tests several_processes)
# A server of buckets, for tests and benches.
add_library(bucket_server OBJECT ${CMAKE_SOURCE_DIR}/tests/bucket_server.cc)
target_link_libraries(bucket_server PUBLIC md_base nlohmann_json::nlohmann_json)
md_tests(remote PLAIN_PROGRAMS USES data checkpoint SHARDS 3 COST 30)
target_link_libraries(remote_tests PRIVATE bucket_server)
target_link_libraries(processes_tests PRIVATE bucket_server)
md_tests(hub USES storage)
md_tests(fuzz USES commands convert SHARDS 4 COST 20)
target_link_libraries(fuzz_tests PRIVATE PkgConfig::ZLIB)
target_link_libraries(cli_tests PRIVATE bucket_server)
md_tests(pipelines DEVICE PLAIN_PROGRAMS USES commands convert SHARDS 4 COST 70)
md_tests(server DEVICE PLAIN_PROGRAMS USES media server SHARDS 2 COST 40)
target_sources(server_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/fuzz/mutate.cc)
md_tests(layering USES base QUICK *)
# A project outside this repository, built against an installed prefix.
set(sanitizers "")
if(MD_SANITIZE)
  set(sanitizers -fsanitize=${MD_SANITIZE})
endif()
md_ctest(tests.consumer ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DBUILD=${CMAKE_BINARY_DIR}
         -DVERSION=${PROJECT_VERSION} -DCOMPILER=${CMAKE_CXX_COMPILER}
         -DFLAGS=${sanitizers}
         -P ${CMAKE_SOURCE_DIR}/tests/consumer/consumer.cmake LABELS device COST 20)
# Packages of the build, in a root that has nothing else. Builds with a sanitizer have paths of this machine.
if(NOT MD_SANITIZE)
  md_ctest(tests.package ${CMAKE_SOURCE_DIR}/tests/package/package.sh ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR} ${MD_DEPS}
           ${PROJECT_VERSION} LABELS device COST 200)
endif()

md_bench(data_bench USES data tokenizers)
if(TARGET data_bench)
  target_link_libraries(data_bench PRIVATE bucket_server)
endif()

# An allocator that keeps large blocks, so that the memory of a step is not cleared by the kernel again for the next. It
# stands before the C library's by the order of loading, and nothing names it. Sanitizers bring their own.
add_library(md_allocator INTERFACE)
if(NOT MD_SANITIZE)
  target_link_options(md_allocator INTERFACE LINKER:--push-state,--no-as-needed -ltcmalloc_minimal LINKER:--pop-state)
endif()

# Training steps timed from the start of the process; has a main of its own. See bench/compare.py.
add_executable(model_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/model_bench.cc)
target_link_libraries(model_bench PRIVATE md_train md_allocator)
target_compile_definitions(model_bench PRIVATE MD_SOURCE_DIR="${CMAKE_SOURCE_DIR}")

# Saving while steps go on; see bench/checkpoint.py.
add_executable(checkpoint_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/checkpoint_bench.cc)
target_link_libraries(checkpoint_bench PRIVATE md_allocator md_ops md_runtime md_checkpoint)

# Model folders of the published sizes; see bench/real.py.
add_executable(random_weights EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/random_weights.cc)
target_link_libraries(random_weights PRIVATE md_allocator md_families)
md_packaged(random_weights)

# A video autoencoder; see bench/video.py.
add_executable(video_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/video_bench.cc)
target_link_libraries(video_bench PRIVATE md_allocator md_encoders)

# Updates by each optimizer.
add_executable(optimizer_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/optimizer_bench.cc)
target_link_libraries(optimizer_bench PRIVATE md_allocator md_ops md_runtime md_train)

# Kernels for TPUs, compiled; see bench/kernels.py.
add_executable(kernel_bench EXCLUDE_FROM_ALL ${CMAKE_SOURCE_DIR}/bench/kernel_bench.cc)
target_link_libraries(kernel_bench PRIVATE md_allocator md_ops md_autodiff md_pjrt)
