#include "../library.h"
#include "rms_norm.h"

namespace trtfuse {
namespace {

// y = x / sqrt(mean(x * x) + epsilon) * scale
class RmsNorm : public PluginOf<RmsNorm> {
 public:
    static const Declaration declaration;
    using PluginOf::PluginOf;

 protected:
    enum { X, SCALE };

    cudaError_t launch(const Call& c) const override {
        return rms_norm({c.type, c.input(X), nullptr, nullptr, c.input(SCALE), nullptr, c.output(0), nullptr,
                         c.rows, c.columns, fields().number("epsilon"), false, c.stream});
    }
};

const Declaration RmsNorm::declaration = {
    "TrtfuseRmsNorm",
    {{"x", Shape::kMain, false}, {"scale", Shape::kRow, true}},
    {"y"},
    {FieldRule::of_float("epsilon", 1e-6)},
};

// s = x (+ preset) + skip; y = s / sqrt(mean(s * s) + epsilon) * scale; second output: s
class SkipRmsNorm : public PluginOf<SkipRmsNorm> {
 public:
    static const Declaration declaration;
    using PluginOf::PluginOf;

 protected:
    enum { X, SKIP, SCALE, PRESET };
    enum { Y, SUM };

    cudaError_t launch(const Call& c) const override {
        return rms_norm({c.type, c.input(X), c.input(SKIP), c.input(PRESET), c.input(SCALE), nullptr,
                         c.output(Y), c.output(SUM), c.rows, c.columns, fields().number("epsilon"),
                         c.is_scalar(PRESET), c.stream});
    }
};

const Declaration SkipRmsNorm::declaration = {
    "TrtfuseSkipRmsNorm",
    {{"x", Shape::kMain, false},
     {"skip", Shape::kSame, false},
     {"scale", Shape::kRow, true},
     {"preset", Shape::kRowOrScalar, true}},
    {"y", "sum"},
    {FieldRule::of_float("epsilon", 1e-6)},
};

}  // namespace

Creator& rms_norm_creator() { return creator_of<RmsNorm>(); }
Creator& skip_rms_norm_creator() { return creator_of<SkipRmsNorm>(); }

}  // namespace trtfuse
