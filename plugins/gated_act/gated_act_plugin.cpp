#include "../common/activation_field.h"
#include "../library.h"
#include "gated_act.h"

namespace trtfuse {
namespace {

enum { GATE, UP };

// y = act(gate) * up
class GatedAct : public PluginOf<GatedAct> {
 public:
    static const Declaration declaration;

    explicit GatedAct(const nvinfer1::PluginFieldCollection* given)
        : PluginOf(given), activation_(activation_of(fields())) {}

 protected:
    cudaError_t launch(const Call& c) const override {
        return gated_act({c.type, activation_, fields().number("alpha"), c.input(GATE), c.input(UP),
                          c.output(0), c.rows * c.columns, c.stream});
    }

 private:
    Activation activation_;
};

const Declaration GatedAct::declaration = {
    "TrtfuseGatedAct",
    {{"gate", Shape::kMain, false}, {"up", Shape::kSame, false}},
    {"y"},
    {FieldRule::of_text("activation", "silu"), FieldRule::of_float("alpha", 0.01)},
};

}  // namespace

Creator& gated_act_creator() { return creator_of<GatedAct>(); }

}  // namespace trtfuse
