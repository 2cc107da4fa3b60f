// KeyPath: what a key that names a place of this machine says of it.
#pragma once

namespace md {

/// Relative paths of inputs in a file are relative to that file, those of outputs, and all on the command line, to the
/// working folder. `…_or_word`: also a word that is no path (a name in the Hugging Face cache, off), where nothing of
/// that path is there. URIs are no paths.
enum class KeyPath { none, input, input_or_word, output, output_or_word };

}  // namespace md
