// Each field of each endpoint is obeyed, refused by its name, or named in `warnings`: the lists of server/fields.h,
// sent to a server.
#include <filesystem>

#include "maxdiffusion/base/base64.h"
#include "maxdiffusion/media/image.h"
#include "maxdiffusion/server/fields.h"
#include "tests/cli/command.h"
#include "tests/server/server.h"

namespace md {
namespace {

const std::string kSd = MD_SOURCE_DIR "/tests/golden/pipelines/sd", kFlux = MD_SOURCE_DIR "/tests/golden/flux/dev";
const std::string T = "/sdapi/v1/txt2img", I = "/sdapi/v1/img2img", G = "/v1/images/generations",
                  E = "/v1/images/edits";

std::string some_png(int64_t height, int64_t width, int shade) {
  HostArray rgb(Shape{DType::u8, {height, width, 3}});
  auto v = rgb.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<uint8_t>(static_cast<size_t>(shade) + i * 7 % 97);
  return encode_png(rgb);
}
std::string half_mask(int64_t side) {
  HostArray rgb(Shape{DType::u8, {side, side, 3}});
  auto v = rgb.mutable_view<uint8_t>();
  for (size_t i = 0; i < v.size(); ++i)
    v[i] = i / 3 % static_cast<size_t>(side) >= static_cast<size_t>(side) / 2 ? 255 : 0;
  return encode_png(rgb);
}

class ServedFields : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    server = new TestServer({kSd, kFlux, "height=16", "width=16", "num_inference_steps=2", "warm_up=false",
                             "max_pixels=4096", "max_steps=20", "max_images=4", "max_body_mb=4"});
  }
  static void TearDownTestSuite() { delete server; }
  /// A request of this endpoint that has all that other fields need.
  static json whole(const std::string& endpoint) {
    const std::string photo = to_base64(some_png(16, 16, 30)), mask = to_base64(half_mask(16));
    if (endpoint == T) return {{"prompt", "x"}, {"seed", 1}, {"steps", 4}, {"enable_hr", true}, {"hr_scale", 1.5}};
    if (endpoint == I)
      return {{"prompt", "x"}, {"seed", 1}, {"steps", 4}, {"init_images", {photo}}, {"mask", mask}, {"mask_blur", 0}};
    if (endpoint == E) return {{"prompt", "x"}, {"seed", 1}, {"image", photo}, {"num_inference_steps", 4}};
    if (endpoint == "/sdapi/v1/options") return json::object();
    if (endpoint == "/sdapi/v1/png-info") return {{"image", photo}};
    return {{"prompt", "x"}};
  }
  static std::string message_of(const Answer& a) {
    const json v = a.value();
    if (v.contains("detail")) return v["detail"];
    return v["error"].is_object() ? v["error"]["message"] : v["error"];
  }
  /// The warnings of an answer, one a line.
  static std::string warnings_of(const Answer& a) {
    EXPECT_EQ(a.status, 200) << a.body;
    json v = a.value();
    if (v.is_object() && v.contains("info") && v.contains("images"))
      v = parse_json_or_discard(v["info"].get<std::string>());
    std::string out;
    if (v.is_object() && v.contains("warnings"))
      for (const json& w : v["warnings"]) out += w.get<std::string>() + "\n";
    return out;
  }
  /// The image of an answer of the web UI's interface or of OpenAI's with b64_json, without its texts.
  static std::string pixels_of(const Answer& a) {
    EXPECT_EQ(a.status, 200) << a.body.substr(0, 1000);
    if (a.status != 200) return "";
    const json v = a.value();
    const json& text = v.contains("images") ? v["images"][0] : v["data"][0]["b64_json"];
    const std::string png = *from_base64(text.get<std::string>());
    return png.substr(png.find("IDAT"));
  }
  static std::string pixels(const std::string& endpoint, json request) {
    if (endpoint == G || endpoint == E) request["response_format"] = "b64_json";
    return pixels_of(server->post(endpoint, request));
  }
  inline static TestServer* server = nullptr;
};

TEST_F(ServedFields, OfAllEndpointsAreReadOrRefusedOrNamed) {
  for (const auto& endpoint : {T, I, G, E, std::string("/sdapi/v1/options"), std::string("/sdapi/v1/png-info"),
                               std::string("/api/generate")}) {
    json ignored = whole(endpoint), off = ignored;
    std::vector<std::string> named;
    for (const ServedField& f : served_fields(endpoint)) {
      json one = whole(endpoint);
      switch (f.fate) {
        case ServedField::obeyed: {  // whoever reads it finds that an object is not what it takes
          if (f.name == "override_settings" || f.name == "distilled_cfg_scale") break;
          one[f.name] = {{"an", "object"}};
          if (f.name == "mask_blur_x" || f.name == "mask_blur_y") one.erase("mask_blur");
          const Answer a = server->post(endpoint, one);
          EXPECT_TRUE(a.status == 400 || a.status == 404) << endpoint << " " << f.name << ": " << a.status << a.body;
          EXPECT_TRUE(contains(message_of(a), f.name)) << endpoint << " " << f.name << ": " << message_of(a);
          break;
        }
        case ServedField::refused: {
          one[f.name] = "unusual";
          const Answer a = server->post(endpoint, one);
          EXPECT_EQ(a.status, 400) << f.name;
          EXPECT_TRUE(message_of(a).starts_with(f.name + " is ")) << message_of(a);
          break;
        }
        case ServedField::ignored:
          if (!f.reason.empty()) {
            ignored[f.name] = f.off.is_null() || f.off[0].is_string() ? json("unusual") : json(77);
            named.push_back(f.name);
          }
          off[f.name] = f.off.is_null() ? json(false) : f.off[0];
      }
    }
    ignored["unknown_field"] = 1;
    const std::string warnings = warnings_of(server->post(endpoint, ignored));
    for (const std::string& name : named) EXPECT_TRUE(contains(warnings, name)) << endpoint << " " << name << warnings;
    if (endpoint != "/sdapi/v1/png-info") {
      EXPECT_TRUE(contains(warnings, "a field is ignored: unknown_field")) << endpoint << warnings;
    }
    EXPECT_EQ(warnings_of(server->post(endpoint, off)), "") << endpoint;
  }
  const std::string warnings = warnings_of(server->post(
      T, {{"prompt", "x"}, {"override_settings", {{"eta_noise_seed_delta", 31337}, {"samples_format", "jpg"}}}}));
  EXPECT_TRUE(contains(warnings, "override_settings: a field is ignored: eta_noise_seed_delta")) << warnings;
  EXPECT_TRUE(contains(warnings, "override_settings: samples_format is ignored")) << warnings;
}

TEST_F(ServedFields, ValuesAreThoseOfTheWebUi) {
  const json t = {{"prompt", "a cat"}, {"seed", 3}, {"steps", 5}}, i = whole(I);
  const auto with = [](json a, const json& b) {
    a.update(b);
    return a;
  };
  // Automatic: the sampler's own schedule in the web UI.
  for (const auto& [sampler, schedule] : {std::pair{"DPM++ 2M", "Karras"},
                                          {"DPM2 a", "Karras"},
                                          {"DPM++ 2M SDE", "Exponential"},
                                          {"DPM++ 3M SDE", "Exponential"},
                                          {"DPM++ SDE", "Karras"},
                                          {"Euler", "Uniform"}}) {
    const std::string automatic = pixels(T, with(t, {{"sampler_name", sampler}, {"scheduler", "Automatic"}}));
    EXPECT_TRUE(automatic == pixels(T, with(t, {{"sampler_name", sampler}, {"scheduler", schedule}}))) << sampler;
    if (std::string(schedule) != "Uniform") {
      EXPECT_FALSE(automatic == pixels(T, with(t, {{"sampler_name", sampler}, {"scheduler", "Uniform"}}))) << sampler;
    }
  }
  // Schedules by the web UI's titles and names in any case, also at the end of a sampler's title.
  const json euler = with(t, {{"sampler_name", "Euler a"}}), karras = with(euler, {{"scheduler", "Karras"}});
  for (const char* name : {"karras", "KARRAS"})
    EXPECT_TRUE(pixels(T, with(euler, {{"scheduler", name}})) == pixels(T, karras)) << name;
  EXPECT_TRUE(pixels(T, with(t, {{"sampler_name", "Euler a Karras"}, {"scheduler", "Automatic"}})) ==
              pixels(T, karras));
  for (const char* name : {"uniform", "Normal"})
    EXPECT_TRUE(pixels(T, with(euler, {{"scheduler", name}})) == pixels(T, with(euler, {{"scheduler", "Uniform"}})))
        << name;
  EXPECT_TRUE(pixels(T, with(euler, {{"scheduler", "align_your_steps"}})) ==
              pixels(T, with(euler, {{"scheduler", "Align Your Steps"}})));
  json masked = i;
  masked.erase("mask_blur");
  const std::string blurred = pixels(I, with(i, {{"mask_blur", 2}}));
  EXPECT_TRUE(pixels(I, with(masked, {{"mask_blur_x", 2}, {"mask_blur_y", 2}})) == blurred);
  EXPECT_FALSE(pixels(I, with(i, {{"mask_blur", 0}})) == blurred);
  EXPECT_TRUE(contains(message_of(server->post(I, with(masked, {{"mask_blur_x", 2}, {"mask_blur_y", 3}}))),
                       "mask_blur_x is 2 and mask_blur_y 3; expected equal ones"));
  // Booleans and numbers as pydantic takes them.
  const std::string inverted = pixels(I, with(i, {{"inpainting_mask_invert", 1}, {"inpaint_full_res", true}}));
  EXPECT_TRUE(pixels(I, with(i, {{"inpainting_mask_invert", true}, {"inpaint_full_res", 1}})) == inverted);
  EXPECT_TRUE(pixels(I, with(i, {{"inpainting_mask_invert", "1"}, {"inpaint_full_res", "True"}})) == inverted);
  EXPECT_FALSE(pixels(I, with(i, {{"inpainting_mask_invert", 0}, {"inpaint_full_res", "False"}})) == inverted);
  EXPECT_EQ(server->post(I, with(i, {{"inpaint_full_res", 2}})).status, 400);
  // Base64 with ends of lines and spaces, and in data: URLs.
  const std::string photo = i["init_images"][0];
  std::string lines = photo, spaces = photo;
  for (size_t at = 60; at < lines.size(); at += 62) lines.insert(at, "\r\n");
  for (size_t at = 7; at < spaces.size(); at += 9) spaces.insert(at, " \t");
  const std::string plain = pixels(I, i);
  for (const std::string& text :
       {lines, spaces, "\n " + photo + " \n", "data:image/png;base64," + lines,
        "data:image/png;charset=utf-8;name=a.png;base64," + photo, " data:;base64, " + spaces, "data:," + photo})
    EXPECT_TRUE(pixels(I, with(i, {{"init_images", {text}}})) == plain) << text.substr(0, 60);
  for (const char* text : {"", "data:", "data:image/png;base64", "data:image/png;base64,", "@@@@"}) {
    const Answer a = server->post(I, with(i, {{"init_images", {text}}}));
    EXPECT_EQ(a.status, 400) << text;
    EXPECT_TRUE(contains(message_of(a), "init_images is not base64")) << message_of(a);
  }
  // The second pass.
  const json hr = with(t, {{"enable_hr", true}, {"hr_scale", 2}, {"denoising_strength", 0.6}});
  for (const char* unknown : {"R-ESRGAN 4x+", "Latent (bicubic)", "Latent (nearest)"}) {
    const Answer a = server->post(T, with(hr, {{"hr_upscaler", unknown}}));
    EXPECT_EQ(a.status, 400) << unknown;
    EXPECT_TRUE(contains(message_of(a), fmt::format("hr_upscaler is '{}'; expected Latent, Lanczos", unknown)));
  }
  EXPECT_FALSE(pixels(T, with(hr, {{"hr_upscaler", "Latent"}})) == pixels(T, with(hr, {{"hr_upscaler", "Lanczos"}})));
}

TEST_F(ServedFields, PngInfoHasTheSettingsByName) {
  TemporaryFolder t;
  write_png(t / "a.png", HostArray(Shape{DType::u8, {8, 8, 3}}),
            {{"parameters", "a cat\nNegative prompt: bad\nSteps: 3, Sampler: DPM++ 2M, Seed: 5, Size: 64x96"}});
  const json info = server->post("/sdapi/v1/png-info", {{"image", to_base64(read_file(t / "a.png"))}}).value();
  EXPECT_EQ(info["parameters"], (json{{"Prompt", "a cat"},
                                      {"Negative prompt", "bad"},
                                      {"Steps", "3"},
                                      {"Sampler", "DPM++ 2M"},
                                      {"Seed", "5"},
                                      {"Size-1", "64"},
                                      {"Size-2", "96"}}));
}

TEST_F(ServedFields, RefusalsNameTheFieldsOfTheRequest) {
  const json t = {{"prompt", "x"}, {"seed", 1}};
  const auto says = [&](const std::string& endpoint, const json& fields) {
    json body = endpoint == I ? whole(I) : t;
    body.update(fields);
    const Answer a = server->post(endpoint, body);
    EXPECT_EQ(a.status, 400) << a.body;
    return message_of(a);
  };
  EXPECT_TRUE(says(T, {{"steps", 21}}).starts_with("steps is 21; expected 1 to 20"));
  EXPECT_TRUE(says(T, {{"cfg_scale", 1e38}}).starts_with("cfg_scale is 1e+38; expected 0 to 1000"));
  EXPECT_TRUE(contains(says(T, {{"enable_hr", true}, {"hr_scale", 0.5}}), "hr_scale is `0.5`"));
  EXPECT_EQ(says(I, {{"denoising_strength", 0}}),
            "denoising_strength is 0, and so none of steps=4 steps runs; expected a larger part, or more steps; try: "
            "denoising_strength=0.25");
  json body = t;
  body.update({{"negative_prompt", "bad"}, {"cfg_scale", 1}});
  EXPECT_TRUE(contains(warnings_of(server->post(T, body)), "there is no guidance (cfg_scale up to 1"));
  // Two names of one thing.
  EXPECT_EQ(says(G, {{"sample_seed", 2}}), "seed and sample_seed are both given; expected one of them");
  EXPECT_EQ(says(G, {{"n", 1}, {"num_images_per_prompt", 2}}),
            "n and num_images_per_prompt are both given; expected one of them");
  EXPECT_EQ(says(G, {{"size", "16x16"}, {"width", 32}}), "size and width are both given; expected one of them");
  EXPECT_EQ(server->post(G, {{"prompt", "x"}, {"size", "auto"}, {"width", 16}, {"seed", nullptr}}).status, 200);
  const std::string broken =
      message_of(server->send(server->request("POST", T, "{\"prompt\": 'x'}", {"Content-Type: application/json"})));
  EXPECT_TRUE(contains(broken, "the body is no JSON object: ") && contains(broken, "column 12")) << broken;
}

TEST_F(ServedFields, TitlesOfModelsAndSchedulesOfTheWebUiAreTaken) {
  const json t = {{"prompt", "x"}, {"seed", 1}, {"steps", 4}};
  const auto with = [&](const json& b) {
    json body = t;
    body.update(b);
    return body;
  };
  for (const char* title : {"sd", "sd.safetensors", "sd.safetensors [31e35c80fc]", "sd [31e35c80fc]"})
    EXPECT_TRUE(pixels(T, with({{"override_settings", {{"sd_model_checkpoint", title}}}})) == pixels(T, t)) << title;
  for (const char* title : {"sd.pt", "other.safetensors", "safetensors", ".safetensors", "[x]"})
    EXPECT_EQ(server->post("/sdapi/v1/options", {{"sd_model_checkpoint", title}}).status, 400) << title;
  // DDIM steps over timesteps, whatever the schedule is, as in the web UI.
  const json ddim = with({{"sampler_name", "DDIM"}});
  for (const auto& [schedule, warns] : {std::pair{"Karras", true}, {"Uniform", false}, {"Automatic", false}}) {
    const Answer a = server->post(T, with({{"sampler_name", "DDIM"}, {"scheduler", schedule}}));
    EXPECT_EQ(warnings_of(a), warns ? "scheduler is ignored: DDIM steps over timesteps\n" : "") << schedule;
    EXPECT_TRUE(pixels_of(a) == pixels(T, ddim)) << schedule;
  }
  EXPECT_EQ(server->get("/sdapi/v1/upscalers").value()[1]["name"], "Lanczos");
  EXPECT_EQ(server->get("/sdapi/v1/latent-upscale-modes").value(), json::array({{{"name", "Latent"}}}));
}

TEST_F(ServedFields, SeedsAreExact) {
  for (const uint64_t seed : {uint64_t{1} << 53 | 1, (uint64_t{1} << 63) - 1, ~uint64_t{0}}) {
    const json info =
        parse_json_or_discard(server->post(T, {{"prompt", "x"}, {"seed", seed}}).value()["info"].get<std::string>());
    EXPECT_EQ(info["seed"].get<uint64_t>(), seed);
    EXPECT_TRUE(pixels(T, {{"prompt", "x"}, {"seed", seed}}) ==
                pixels(T, {{"prompt", "x"}, {"seed", std::to_string(seed)}}));
    EXPECT_TRUE(pixels(T, {{"prompt", "x"}, {"seed", seed}}) ==
                pixels(G, {{"prompt", "x"}, {"seed", seed}, {"prompt_syntax", "a1111"}}));
    const json job = server->post("/api/generate", {{"prompt", "x"}, {"sample_seed", seed}}).value();
    const std::string events = server->get("/api/jobs/" + job["id"].get<std::string>()).body;
    EXPECT_TRUE(contains(events, fmt::format("\"seed\":{}", seed))) << events;
  }
  EXPECT_FALSE(pixels(T, {{"prompt", "x"}, {"seed", (uint64_t{1} << 53) + 1}}) ==
               pixels(T, {{"prompt", "x"}, {"seed", uint64_t{1} << 53}}));
}

TEST_F(ServedFields, EditsTakeJson) {
  const std::string photo = some_png(24, 24, 60), mask = half_mask(24);
  const Answer form = server->post_form(
      E, {{"prompt", "a hat"}, {"seed", "3"}, {"response_format", "b64_json"}, {"num_inference_steps", "4"}},
      {{"image", photo}, {"mask", mask}});
  const json body = {{"prompt", "a hat"}, {"seed", 3}, {"num_inference_steps", 4}};
  for (const json& image : {json(to_base64(photo)), json("data:image/png;base64," + to_base64(photo)),
                            json::array({{{"image_url", "data:image/png;base64," + to_base64(photo)}}})}) {
    json request = body;
    request["image"] = image, request["mask"] = to_base64(mask);
    EXPECT_TRUE(pixels(E, request) == pixels_of(form));
  }
  // OpenAI's reference calls the list `images`.
  const std::string url = "data:image/png;base64," + to_base64(photo);
  for (const json& images : {json::array({{{"image_url", url}}}), json::array({{{"image_url", {{"url", url}}}}})}) {
    json request = body;
    request["images"] = images, request["mask"] = {{"image_url", to_base64(mask)}};
    EXPECT_TRUE(pixels(E, request) == pixels_of(form));
  }
  json request = body;
  EXPECT_TRUE(contains(message_of(server->post(E, request)), "image is missing"));
  request["image"] = "https://example.com/a.png";
  EXPECT_TRUE(contains(message_of(server->post(E, request)), "image is not base64 but an address, and the server"));
}

TEST_F(ServedFields, WarningsOfTheCommandReachEveryRequest) {
  for (int i = 0; i < 2; ++i) {  // not only the first
    std::string w = warnings_of(server->post(G, {{"prompt", "x"}, {"strength", 0.5}, {"seed", 1}}));
    EXPECT_TRUE(contains(w, "strength is ignored: samples start from pure noise")) << w;
    w = warnings_of(server->post(G, {{"prompt", "x"}, {"negative_prompt", "bad"}, {"seed", 1}, {"model", "dev"}}));
    EXPECT_TRUE(contains(w, "negative_prompt is ignored")) << w;
    w = warnings_of(server->post(G, {{"prompt", "x"}, {"mask_blur", 3}, {"true_cfg_scale", 2}}));
    EXPECT_TRUE(contains(w, "mask_blur is ignored: there is no mask_image")) << w;
    EXPECT_TRUE(contains(w, "true_cfg_scale is ignored: this model is guided by guidance_scale")) << w;
    std::string longest;
    for (int word = 0; word < 200; ++word) longest += "apple ";
    w = warnings_of(server->post(G, {{"prompt", longest}, {"seed", 1}}));
    EXPECT_TRUE(contains(w, "tokens is cut")) << w;
  }
  EXPECT_EQ(warnings_of(server->post(G, {{"prompt", "x"}, {"negative_prompt", "bad"}, {"seed", 1}})), "");
  // Forge's two scales.
  const json model = {{"override_settings", {{"sd_model_checkpoint", "dev"}}}, {"prompt", "x"}, {"seed", 1}};
  json forge = model, plain = model;
  forge["cfg_scale"] = 1, forge["distilled_cfg_scale"] = 6, plain["cfg_scale"] = 6;
  const std::string guided = pixels(T, forge);
  EXPECT_TRUE(guided == pixels(T, plain));
  forge["distilled_cfg_scale"] = 1;
  EXPECT_FALSE(guided == pixels(T, forge));
  const std::string w = warnings_of(server->post(T, {{"prompt", "x"}, {"distilled_cfg_scale", 2}}));
  EXPECT_TRUE(contains(w, "distilled_cfg_scale is ignored")) << w;
}

}  // namespace
}  // namespace md
