// Where this program is installed, what is installed with it, and what users type to start it. Nothing of it is known
// when the program is built: folders are found from the program's own, so that an installed one may be moved.
#pragma once

#include <string>
#include <vector>

namespace md {

/// What users type to start this program: "./run" where the script of a checkout started it, else "maxdiffusion".
const std::string& program_name();

/// A library of ours by its file's name: next to the program, as in a build, or where its linker looks for libraries,
/// as in PREFIX/lib/maxdiffusion. The name itself where there is none.
std::string part_file(const std::string& name);

/// A file that came with the program: PREFIX/share/maxdiffusion/NAME, or NAME of the checkout that the program was
/// built in. Empty where there is none.
std::string shipped_file(const std::string& name);
/// The same, else the first of `others` that is there, else the first of them.
std::string shipped_file_or(const std::string& name, const std::vector<std::string>& others);

/// Folders that may hold wheels unpacked, best first: those that the program came with, the one of its build, and the
/// packages of Pythons that it was installed into.
const std::vector<std::string>& wheel_folders();
/// A file of a wheel, or empty where no folder has it.
std::string wheel_file(const std::string& name);

}  // namespace md
