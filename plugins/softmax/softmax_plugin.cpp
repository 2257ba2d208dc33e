#include <cmath>

#include "../library.h"
#include "softmax.h"

namespace trtfuse {
namespace {

// y = softmax(scale * x + mask); or, where condition is not `keep`, `fill` in place of scale * x
class Softmax : public PluginOf<Softmax> {
 public:
    static const Declaration declaration;

    explicit Softmax(const nvinfer1::PluginFieldCollection* given) : PluginOf(given) {
        const int keep = fields().integer("keep");
        if (keep != 0 && keep != 1) throw Error("field 'keep' must be 0 or 1, not " + std::to_string(keep));
    }

 protected:
    enum { X, MASK, CONDITION };

    cudaError_t launch(const Call& c) const override {
        SoftmaxCall call{};
        call.type = c.type;
        call.x = c.input(X), call.mask = c.input(MASK), call.condition = c.input(CONDITION),
        call.y = c.output(0);
        call.rows = c.rows, call.columns = c.columns, call.stream = c.stream;
        call.scale = fields().number("scale"), call.fill = fields().number("fill");
        call.keep = fields().integer("keep") != 0;
        if (call.mask && call.condition) throw Error("has both 'mask' and 'condition'");
        if (call.mask || call.condition) {
            const int place = call.mask ? MASK : CONDITION;
            call.condition_bytes = c.input_type(place) == nvinfer1::DataType::kBOOL ? 1 : 4;
            const nvinfer1::Dims &own = c.dims(place), &full = c.dims(X);
            if (!broadcast(own.d, own.nbDims, full.d, full.nbDims, call.where)) {
                throw Error("the mask does not broadcast to the scores");
            }
        }
        return softmax(call);
    }
};

const Declaration Softmax::declaration = {
    "TrtfuseSoftmax",
    {{"x", Shape::kMain, false}, {"mask", Shape::kBroadcast, true}, {"condition", Shape::kCondition, true}},
    {"y"},
    {FieldRule::of_float("scale", 1.0), FieldRule::of_float("fill", -INFINITY), FieldRule::of_int("keep", 1)},
};

}  // namespace

Creator& softmax_creator() { return creator_of<Softmax>(); }

}  // namespace trtfuse
