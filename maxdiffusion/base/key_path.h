// KeyPath: how relative paths in a key's value are resolved.
#pragma once

namespace md {

/// Input paths in a YAML file are relative to that file. Output paths, and all paths on the command line, are relative
/// to the working folder. `…_or_word`: the value may also be a word (a Hugging Face name, "off"); it is a word if no
/// file has that path. URIs are not changed.
enum class KeyPath { none, input, input_or_word, output, output_or_word };

}  // namespace md
