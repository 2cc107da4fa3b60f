// `completion`: prints the script with which a shell completes commands and keys.
#include <fmt/format.h>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/installation.h"
#include "maxdiffusion/commands/command.h"

namespace md {
namespace {

/// Location of a shell's script: relative to share/maxdiffusion of an installation, and in a checkout.
struct Shell {
  const char *name, *installed, *in_checkout;
};
constexpr Shell kShells[] = {
    {"bash", "../bash-completion/completions/maxdiffusion", "apps/completion/maxdiffusion.bash"},
    {"zsh", "../zsh/site-functions/_maxdiffusion", "apps/completion/_maxdiffusion"}};

void completion(const Words& words) {
  for (const Shell& shell : kShells) {
    if (words != Words{shell.name}) continue;
    const std::string file = shipped_file_or(shell.installed, {shipped_file(shell.in_checkout)});
    check(!file.empty(), Code::io, "completion: {} is not installed with this program", shell.in_checkout);
    return fmt::print("{}", read_file(file));
  }
  fail(Code::invalid_config, "completion: expected bash or zsh; try: source <({} completion bash)", program_name());
}

}  // namespace

Command completion_command() {
  return {"completion", "bash|zsh", "print what the shell reads to complete commands and keys", completion,
          [](const KeyPrinter&) {}};
}

}  // namespace md
