#include "maxdiffusion/base/error.h"
#include "maxdiffusion/commands/command.h"
#include "maxdiffusion/commands/train.h"

namespace md {

Command train_dreambooth_command() {
  return {"train_dreambooth",
          kConfigArguments,
          "train one subject with images of its class (DreamBooth)",
          [](const Words& words) {
            const TrainingRequest request = training_request(config_of("train_dreambooth", words), true);
            check(!request.data.dreambooth.instance_data_dir.empty(), Code::invalid_config,
                  "train_dreambooth: instance_data_dir is empty; expected the folder of the subject's images");
            train(request);
          },
          print_all_config_keys,
          true};
}

}  // namespace md
