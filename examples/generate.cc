// Generates images with a model folder in diffusers' layout, of any supported family: one for each prompt.
//   generate FOLDER PIXELS PROMPT...
#include <maxdiffusion/maxdiffusion.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc < 4) return std::fprintf(stderr, "usage: %s FOLDER PIXELS PROMPT...\n", argv[0]), 2;
  try {
    md::DiffusionPipeline pipeline = md::DiffusionPipeline::load(argv[1]);
    md::SampleRequest request;
    request.num_inference_steps = 20;
    request.resolution = std::atoi(argv[2]);
    for (int i = 3; i < argc; ++i) {  // later prompts read and compile nothing
      request.prompt = {argv[i]};
      const std::string file = "image_" + std::to_string(i - 3) + ".png";
      md::write_png(file, md::image_of_batch(pipeline.generate(request).media, 0));
      std::printf("%s: %s\n", file.c_str(), argv[i]);
    }
    return 0;
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "error: %s\n", e.what()), 1;
  }
}
