#include "maxdiffusion/convert/convert.h"

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/commands/command.h"

namespace md {

Command convert_command() {
  return {"convert", "IN OUT [format=diffusers|single_file] [dtype=float16] [component=NAME] [ema=false] [key=value …]",
          "convert a model to diffusers' folder layout, or to a single file",
          [](const Words& words) {
            check(words.size() >= 2, Code::invalid_config,
                  "convert: two paths are needed; try: {} convert FOLDER FILE.safetensors", program_name());
            ConvertKeys keys;
            assign(words, 2, keys);
            convert(words[0], words[1], keys);
          },
          [](const KeyPrinter& print) { print_command_keys<ConvertKeys>(print); }};
}

}  // namespace md
