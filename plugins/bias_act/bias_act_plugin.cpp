#include "../common/activation_field.h"
#include "../library.h"
#include "bias_act.h"

namespace trtfuse {
namespace {

enum { X, BIAS };

// y = act(x + bias)
class BiasAct : public PluginOf<BiasAct> {
 public:
    static const Declaration declaration;

    explicit BiasAct(const nvinfer1::PluginFieldCollection* given)
        : PluginOf(given), activation_(activation_of(fields())) {}

 protected:
    cudaError_t launch(const Call& c) const override {
        return bias_act({c.type, activation_, fields().number("alpha"), c.input(X), c.input(BIAS),
                         c.output(0), c.rows, c.columns, c.is_scalar(BIAS), c.stream});
    }

 private:
    Activation activation_;
};

const Declaration BiasAct::declaration = {
    "TrtfuseBiasAct",
    {{"x", Shape::kMain, false}, {"bias", Shape::kRowOrScalar, true}},
    {"y"},
    {FieldRule::of_text("activation", "relu"), FieldRule::of_float("alpha", 0.01)},
};

}  // namespace

Creator& bias_act_creator() { return creator_of<BiasAct>(); }

}  // namespace trtfuse
