// The base of all plugins: a plugin is a declaration (name, inputs with their shape rules, outputs, fields)
// and a launch. The rest of IPluginV3 is here.
//
// Which of the optional inputs and outputs a node has is said by two fields that every plugin has: `inputs`
// and `outputs`, names of the declaration separated by spaces, in the node's order. An empty `inputs` means
// the first ones of the declaration, as many as the node has.
#pragma once

#include <NvInferRuntime.h>

#include <memory>
#include <string>
#include <vector>

#include "fields.h"
#include "report.h"
#include "type.h"

namespace trtfuse {

inline constexpr const char* kNamespace = "trtfuse";
inline constexpr const char* kVersion = "1";

enum class Shape {
    kMain,         // rows x columns: the columns are its last axis, the rows all others
    kSame,         // as the main input
    kRow,          // one value a column, other axes 1
    kRowOrScalar,  // that, or one value
    kBroadcast,    // broadcasts to the main input
    kCondition,    // that, of bool or int32
};

struct InputRule {
    const char* name;
    Shape shape;
    bool optional;
};

struct Declaration {
    const char* name;
    std::vector<InputRule> inputs;     // the first is the main one
    std::vector<const char*> outputs;  // of the main input's shape and type; the first is always there
    std::vector<FieldRule> fields;     // without `inputs` and `outputs`, which all have
};

/// Tensors of one execution, by their places in the declaration.
class Call {
 public:
    Type type;
    int64_t rows, columns;
    cudaStream_t stream;

    const void* input(int place) const { return inputs[place]; }
    void* output(int place) const { return outputs[place]; }
    /// Whether that input is there and has one element where a row has several.
    bool is_scalar(int place) const { return inputs[place] && volume(dims(place)) == 1 && columns != 1; }
    const nvinfer1::Dims& dims(int place) const { return described[place]->dims; }
    nvinfer1::DataType input_type(int place) const { return described[place]->type; }
    static int64_t volume(const nvinfer1::Dims& dims);

    std::vector<const void*> inputs;
    std::vector<void*> outputs;
    std::vector<const nvinfer1::PluginTensorDesc*> described;
};

class Plugin : public nvinfer1::IPluginV3,
               public nvinfer1::IPluginV3OneCore,
               public nvinfer1::IPluginV3OneBuild,
               public nvinfer1::IPluginV3OneRuntime {
 public:
    Plugin(const Declaration& declaration, const nvinfer1::PluginFieldCollection* fields);

    nvinfer1::IPluginCapability* getCapabilityInterface(
        nvinfer1::PluginCapabilityType type) noexcept override;
    nvinfer1::IPluginV3* clone() noexcept override;

    const char* getPluginName() const noexcept override { return declaration_->name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }

    int32_t getNbOutputs() const noexcept override;
    int32_t getOutputDataTypes(nvinfer1::DataType* outputs, int32_t outputs_count,
                               const nvinfer1::DataType* inputs,
                               int32_t inputs_count) const noexcept override;
    int32_t getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t inputs_count,
                            const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                            int32_t outputs_count, nvinfer1::IExprBuilder&) noexcept override;
    bool supportsFormatCombination(int32_t place, const nvinfer1::DynamicPluginTensorDesc* described,
                                   int32_t inputs_count, int32_t outputs_count) noexcept override;
    int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t inputs_count,
                            const nvinfer1::DynamicPluginTensorDesc* outputs,
                            int32_t outputs_count) noexcept override;
    const char* getMetadataString() noexcept override;

    int32_t onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t inputs_count,
                          const nvinfer1::PluginTensorDesc* outputs, int32_t outputs_count) noexcept override;
    int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descs,
                    const nvinfer1::PluginTensorDesc* output_descs, const void* const* inputs,
                    void* const* outputs, void*, cudaStream_t stream) noexcept override;
    nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext*) noexcept override {
        return clone();
    }
    const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 protected:
    /// A copy, for clone().
    virtual Plugin* copy() const = 0;
    /// Starts the kernel.
    virtual cudaError_t launch(const Call& call) const = 0;

    const Fields& fields() const { return fields_; }

 private:
    /// Settles which inputs the node has, once their number is known. Throws Error.
    void resolve(int count);
    const InputRule& rule(int position) const { return declaration_->inputs[places_[position]]; }
    void check_shapes(const std::vector<nvinfer1::Dims>& inputs) const;

    const Declaration* declaration_;
    Fields fields_;
    std::vector<int> places_;         // of the node's inputs in the declaration; empty: not settled yet
    std::vector<int> output_places_;  // likewise
    std::string metadata_;
};

/// A plugin class D with `static const Declaration declaration` in one line each: class D : public
/// PluginOf<D>.
template <typename D>
class PluginOf : public Plugin {
 public:
    explicit PluginOf(const nvinfer1::PluginFieldCollection* fields) : Plugin(D::declaration, fields) {}

 protected:
    Plugin* copy() const override { return new D(static_cast<const D&>(*this)); }
};

/// The creator of one plugin.
class Creator : public nvinfer1::IPluginCreatorV3One {
 public:
    using Make = Plugin* (*)(const nvinfer1::PluginFieldCollection*);

    Creator(const Declaration& declaration, Make make);

    nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                      nvinfer1::TensorRTPhase) noexcept override;
    const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &collection_; }
    const char* getPluginName() const noexcept override { return declaration_.name; }
    const char* getPluginVersion() const noexcept override { return kVersion; }
    const char* getPluginNamespace() const noexcept override { return kNamespace; }
    const Declaration& declaration() const { return declaration_; }

 private:
    const Declaration& declaration_;
    Make make_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

/// The creator of plugin class D.
template <typename D>
Creator& creator_of() {
    static Creator creator(D::declaration, [](const nvinfer1::PluginFieldCollection* fields) -> Plugin* {
        return new D(fields);
    });
    return creator;
}

/// A declaration's fields with those that all plugins have.
std::vector<FieldRule> all_fields(const Declaration& declaration);

}  // namespace trtfuse
