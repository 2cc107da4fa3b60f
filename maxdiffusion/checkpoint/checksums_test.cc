#include "maxdiffusion/checkpoint/checksums.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "maxdiffusion/base/error.h"
#include "maxdiffusion/base/files.h"
#include "maxdiffusion/base/temporary_folder.h"
#include "maxdiffusion/checkpoint/checkpoint.h"
#include "maxdiffusion/checkpoint/weights.h"

namespace md {
namespace {

namespace fs = std::filesystem;

/// A checkpoint of step 3, with a linked file and one that `write_extra_files` writes.
struct Saved {
  TemporaryFolder t;
  std::string folder = checkpoint_folder(t / "checkpoints", 3);
  Saved() {
    write_file_atomic(t / "vocab.json", "{\"a\": 1}");
    const std::vector<float> values = {1, 2, 3, 4};
    const HostArray a = HostArray::of<float>({DType::f32, {4}}, values);
    CheckpointContent c;
    c.weights["unet"] = {{"w", a}};
    c.files["unet/config.json"] = "{}";
    c.linked["tokenizer/vocab.json"] = t / "vocab.json";
    c.write_extra_files = [](const std::string& to) { write_file_atomic(to + "/lora.txt", "more"); };
    c.state = {{"m", a}};
    c.state_json = "{}";
    write_checkpoint(t / "checkpoints", 3, c);
  }
  void flip(const std::string& name, size_t at) const {
    std::string bytes = read_file(folder + "/" + name);
    bytes.at(at) ^= 1;
    write_file_atomic(folder + "/" + name, bytes);
  }
};

std::string fault(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), Code::io);
    return e.what();
  }
  return "";
}

TEST(Checksums, AConfigThatHasChangedIsAWarning) {
  const Saved s;
  auto message = [&](const std::function<void()>& f) {
    testing::internal::CaptureStderr();
    EXPECT_EQ(fault(f), "");
    return testing::internal::GetCapturedStderr();
  };
  const std::string config = s.folder + "/unet/config.json";
  for (const char* text : {"[]", "{\"more\": 1}"}) {  // of the same size, and of another
    write_file_atomic(config, text);
    Checksums sums(s.folder, std::string("is what it is: ") + text);
    EXPECT_NE(
        message([&] { sums.verify(); }).find("'" + config + "' was changed after the checkpoint was written; is what"),
        std::string::npos);
    EXPECT_EQ(message([&] { sums.verify_sizes("unet"); }), "");  // reported once
  }
  Checksums resumed(s.folder, "not read");
  EXPECT_NE(message([&] { resumed.warn_of_configs(); }).find(config), std::string::npos);
}

TEST(Checksums, AFlippedBitInAnyFileOfACheckpointIsNamed) {
  const Saved whole;
  EXPECT_EQ(fault([&] { verify_checksums(whole.folder); }), "");
  int files = 0;
  for (const auto& f : fs::recursive_directory_iterator(whole.folder)) {
    if (!f.is_regular_file() || f.path().filename() == "checksums.json") continue;
    const std::string name = fs::relative(f.path(), whole.folder);
    if (name == "unet/config.json") continue;
    const Saved s;
    s.flip(name, f.file_size() - 1);
    const std::string e = fault([&] { verify_checksums(s.folder); });
    EXPECT_NE(e.find(s.folder + "/" + name + "': its bytes differ from those written"), std::string::npos) << e;
    ++files;
  }
  EXPECT_EQ(files, 5);  // weights, vocabulary, what `write_extra_files` wrote, arrays and state.json
}

TEST(Checksums, ReadersOfACheckpointVerifyWhatTheyRead) {
  const std::vector<WantedWeight> expected = {{"w", {DType::f32, {4}}}};
  const Saved s;
  EXPECT_EQ(load_weights(s.folder + "/unet", expected).at("w").view<float>()[3], 4);
  s.flip("unet/diffusion_pytorch_model.safetensors", 105);
  for (const char* path : {"/unet", "/unet/", "/unet/diffusion_pytorch_model.safetensors"})
    EXPECT_NE(fault([&] { load_weights(s.folder + path, expected); }).find("its bytes differ"), std::string::npos);
  EXPECT_EQ(read_training_state(s.t / "checkpoints", 3).state.at("m").whole().view<float>()[3], 4);
  s.flip("training_state/arrays.safetensors", 105);
  EXPECT_NE(fault([&] { read_training_state(s.t / "checkpoints", 3); }).find("arrays.safetensors': its bytes differ"),
            std::string::npos);
}

TEST(Checksums, MissingAndCutFilesAndADamagedListAreNamed) {
  const Saved s;
  fs::remove(s.folder + "/unet/config.json");
  EXPECT_NE(fault([&] { verify_checksums(s.folder, "unet"); }).find("config.json"), std::string::npos);
  fs::resize_file(s.folder + "/lora.txt", 1);
  EXPECT_NE(fault([&] { verify_checksums(s.folder, "lora.txt"); }).find("it has 1 bytes; 4 were written"),
            std::string::npos);
  EXPECT_EQ(fault([&] { verify_checksums(s.folder, "training_state"); }), "");
  for (const char* text : {"", "[]", "{\"files\": {}}", R"({"algorithm": "XXH3-128", "files": {"lora.txt": 3}})"}) {
    write_file_atomic(s.folder + "/" + kChecksums, text);
    EXPECT_NE(fault([&] { verify_checksums(s.folder); }).find("checksums.json': "), std::string::npos) << text;
  }
  fs::remove(s.folder + "/" + kChecksums);  // as older versions wrote it
  EXPECT_EQ(fault([&] { verify_checksums(s.folder); }), "");
}

}  // namespace
}  // namespace md
