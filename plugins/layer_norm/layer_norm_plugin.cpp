#include "../library.h"
#include "layer_norm.h"

namespace trtfuse {
namespace {

// y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias
class LayerNorm : public PluginOf<LayerNorm> {
 public:
    static const Declaration declaration;
    using PluginOf::PluginOf;

 protected:
    enum { X, SCALE, BIAS };

    cudaError_t launch(const Call& c) const override {
        return layer_norm({c.type, c.input(X), nullptr, nullptr, c.input(SCALE), c.input(BIAS), c.output(0),
                           nullptr, c.rows, c.columns, fields().number("epsilon"), false, c.stream});
    }
};

const Declaration LayerNorm::declaration = {
    "TrtfuseLayerNorm",
    {{"x", Shape::kMain, false}, {"scale", Shape::kRow, true}, {"bias", Shape::kRow, true}},
    {"y"},
    {FieldRule::of_float("epsilon", 1e-5)},
};

// s = x (+ preset) + skip; y = (s - mean(s)) / sqrt(var(s) + epsilon) * scale + bias; second output: s
class SkipLayerNorm : public PluginOf<SkipLayerNorm> {
 public:
    static const Declaration declaration;
    using PluginOf::PluginOf;

 protected:
    enum { X, SKIP, SCALE, BIAS, PRESET };
    enum { Y, SUM };

    cudaError_t launch(const Call& c) const override {
        return layer_norm({c.type, c.input(X), c.input(SKIP), c.input(PRESET), c.input(SCALE), c.input(BIAS),
                           c.output(Y), c.output(SUM), c.rows, c.columns, fields().number("epsilon"),
                           c.is_scalar(PRESET), c.stream});
    }
};

const Declaration SkipLayerNorm::declaration = {
    "TrtfuseSkipLayerNorm",
    {{"x", Shape::kMain, false},
     {"skip", Shape::kSame, false},
     {"scale", Shape::kRow, true},
     {"bias", Shape::kRow, true},
     {"preset", Shape::kRowOrScalar, true}},
    {"y", "sum"},
    {FieldRule::of_float("epsilon", 1e-5)},
};

}  // namespace

Creator& layer_norm_creator() { return creator_of<LayerNorm>(); }
Creator& skip_layer_norm_creator() { return creator_of<SkipLayerNorm>(); }

}  // namespace trtfuse
