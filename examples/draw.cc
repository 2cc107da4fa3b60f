// Draws from a model folder in diffusers' layout, of any family that the library knows.
//   draw FOLDER PROMPT PICTURE.png [PIXELS]
#include <maxdiffusion/maxdiffusion.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc < 4) return std::fprintf(stderr, "usage: %s FOLDER PROMPT PICTURE.png [PIXELS]\n", argv[0]), 2;
  try {
    const md::ModelFolder folder = md::ModelFolder::open(argv[1]);
    const std::shared_ptr<const md::Family> family = md::make_family(folder);
    const md::ModelWeights weights = md::ModelWeights::for_sampling(folder, *family, {}, 0);
    const md::WeightsOf weights_of = [&](const md::ParamTable& params, const std::string& component) {
      return weights.read(params, component);
    };
    const md::Devices devices = md::Devices::open("cpu");

    md::SampleKeys keys;
    keys.prompt = {argv[2]};
    keys.num_inference_steps = 20;
    const int64_t side = argc > 4 ? std::atoi(argv[4]) : 512;
    md::SampleOptions o = md::sample_options(keys, *family, {side, side}, 1, 1, 0);
    o.scheduler_config = md::sampling_config(folder.scheduler_config(), {});

    md::TextEncoder text(devices, family, 1, weights_of, o.scope, o.compile);
    const md::PromptConditioning prompts = md::encode_prompts(text, *family, o);
    const md::HostArray latents = md::denoise(devices, *family, weights_of, prompts, o);
    const md::ParamTable params = folder.params(family->spec().autoencoder->component);
    md::MediaAutoencoder coder(devices, family, weights.read(params, family->spec().autoencoder->component), 1, o.scope,
                               o.compile);
    md::write_png(argv[3], md::image_of_batch(md::decode_latents(coder, *family, latents), 0));
    std::printf("%s: %s\n", argv[3], argv[2]);
    return 0;
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "error: %s\n", e.what()), 1;
  }
}
