#include "plugin.h"

#include <algorithm>
#include <sstream>

namespace trtfuse {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;

std::vector<std::string> words(const std::string& text) {
    std::istringstream stream(text);
    std::vector<std::string> result;
    for (std::string word; stream >> word;) result.push_back(word);
    return result;
}

std::string show(const Dims& dims) {
    std::string text = "(";
    for (int i = 0; i < dims.nbDims; ++i) text += (i ? ", " : "") + std::to_string(dims.d[i]);
    return text + ")";
}

bool is_float(DataType type) {
    return type == DataType::kFLOAT || type == DataType::kHALF || type == DataType::kBF16;
}

bool is_condition(DataType type) { return type == DataType::kBOOL || type == DataType::kINT32; }

Type kernel_type(DataType type) {
    switch (type) {
        case DataType::kFLOAT:
            return Type::kF32;
        case DataType::kHALF:
            return Type::kF16;
        case DataType::kBF16:
            return Type::kBF16;
        default:
            throw Error("the main input must be fp32, fp16 or bf16, not TensorRT's type " +
                        std::to_string(static_cast<int>(type)));
    }
}

/// Whether sizes may be equal; -1 is not known yet.
bool may_equal(int64_t a, int64_t b) { return a == b || a < 0 || b < 0; }

bool fits(Shape shape, const Dims& own, const Dims& main) {
    if (shape == Shape::kMain) return main.nbDims >= 1;
    if (own.nbDims < 0 || main.nbDims < 0) return true;
    if (shape == Shape::kSame) {
        if (own.nbDims != main.nbDims) return false;
    } else if (own.nbDims > main.nbDims) {
        return false;
    }
    for (int i = 1; i <= own.nbDims; ++i) {
        const int64_t mine = own.d[own.nbDims - i], whole = main.d[main.nbDims - i];
        const bool one = may_equal(mine, 1), same = may_equal(mine, whole);
        const bool row = shape == Shape::kRow || shape == Shape::kRowOrScalar;
        bool good = shape == Shape::kSame ? same : one || same;
        if (row) good = i > 1 ? one : shape == Shape::kRow ? same : one || same;
        if (!good) return false;
    }
    return shape != Shape::kRow || own.nbDims >= 1;
}

const char* demand(Shape shape) {
    switch (shape) {
        case Shape::kMain:
            return "must have at least one axis";
        case Shape::kSame:
            return "must be of the main input's shape";
        case Shape::kRow:
            return "must have one value for each element of the main input's last axis";
        case Shape::kRowOrScalar:
            return "must have one value, or one for each element of the main input's last axis";
        case Shape::kBroadcast:
        case Shape::kCondition:
            return "must broadcast to the main input's shape";
    }
    return "";
}

}  // namespace

std::vector<FieldRule> all_fields(const Declaration& declaration) {
    std::vector<FieldRule> rules = declaration.fields;
    rules.push_back(FieldRule::of_text("inputs", ""));
    rules.push_back(FieldRule::of_text("outputs", declaration.outputs[0]));
    return rules;
}

int64_t Call::volume(const Dims& dims) {
    int64_t volume = 1;
    for (int i = 0; i < dims.nbDims; ++i) volume *= dims.d[i];
    return volume;
}

Plugin::Plugin(const Declaration& declaration, const nvinfer1::PluginFieldCollection* fields)
    : declaration_(&declaration), fields_(all_fields(declaration), fields) {
    for (const std::string& name : words(fields_.text("outputs"))) {
        const auto& known = declaration.outputs;
        const auto at = std::find(known.begin(), known.end(), name);
        if (at == known.end()) throw Error("field 'outputs' names '" + name + "', which is no output");
        output_places_.push_back(static_cast<int>(at - known.begin()));
    }
    if (output_places_.empty() || output_places_[0] != 0) {
        throw Error(std::string("field 'outputs' must begin with '") + declaration.outputs[0] + "'");
    }
    const auto given = words(fields_.text("inputs"));
    if (!given.empty()) resolve(static_cast<int>(given.size()));
}

void Plugin::resolve(int count) {
    const auto& known = declaration_->inputs;
    std::vector<std::string> names = words(fields_.text("inputs"));
    if (names.empty()) {
        if (count > static_cast<int>(known.size())) {
            throw Error("has " + std::to_string(count) + " inputs, " + std::to_string(known.size()) +
                        " at most");
        }
        std::string text;
        for (int i = 0; i < count; ++i) text += (i ? " " : "") + std::string(known[i].name);
        fields_.set_text("inputs", text);
        names = words(text);
    }
    if (static_cast<int>(names.size()) != count) {
        throw Error("field 'inputs' names " + std::to_string(names.size()) + " inputs, the node has " +
                    std::to_string(count));
    }
    if (static_cast<int>(places_.size()) == count) return;
    std::vector<int> places;
    for (const std::string& name : names) {
        const auto at =
            std::find_if(known.begin(), known.end(), [&](const InputRule& r) { return name == r.name; });
        if (at == known.end()) throw Error("field 'inputs' names '" + name + "', which is no input");
        const int place = static_cast<int>(at - known.begin());
        if (std::find(places.begin(), places.end(), place) != places.end()) {
            throw Error("field 'inputs' names '" + name + "' twice");
        }
        places.push_back(place);
    }
    for (int i = 0; i < static_cast<int>(known.size()); ++i) {
        if (!known[i].optional && std::find(places.begin(), places.end(), i) == places.end()) {
            throw Error(std::string("input '") + known[i].name + "' is missing");
        }
    }
    if (places[0] != 0) throw Error(std::string("field 'inputs' must begin with '") + known[0].name + "'");
    places_ = std::move(places);
}

void Plugin::check_shapes(const std::vector<Dims>& inputs) const {
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (fits(rule(i).shape, inputs[i], inputs[0])) continue;
        throw Error(std::string("input '") + rule(i).name + "' of shape " + show(inputs[i]) + " " +
                    demand(rule(i).shape) + ", which is " + show(inputs[0]));
    }
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(nvinfer1::PluginCapabilityType type) noexcept {
    switch (type) {
        case nvinfer1::PluginCapabilityType::kCORE:
            return static_cast<nvinfer1::IPluginV3OneCore*>(this);
        case nvinfer1::PluginCapabilityType::kBUILD:
            return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
        case nvinfer1::PluginCapabilityType::kRUNTIME:
            return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
    }
    return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
    return guarded<nvinfer1::IPluginV3*>(getPluginName(), nullptr, [&] { return copy(); });
}

int32_t Plugin::getNbOutputs() const noexcept { return static_cast<int32_t>(output_places_.size()); }

int32_t Plugin::getOutputDataTypes(DataType* outputs, int32_t outputs_count, const DataType* inputs,
                                   int32_t inputs_count) const noexcept {
    if (inputs_count < 1) return 1;
    std::fill(outputs, outputs + outputs_count, inputs[0]);
    return 0;
}

int32_t Plugin::getOutputShapes(const nvinfer1::DimsExprs* inputs, int32_t inputs_count,
                                const nvinfer1::DimsExprs*, int32_t, nvinfer1::DimsExprs* outputs,
                                int32_t outputs_count, nvinfer1::IExprBuilder&) noexcept {
    return guarded(getPluginName(), 1, [&] {
        resolve(inputs_count);
        std::fill(outputs, outputs + outputs_count, inputs[0]);
        return 0;
    });
}

bool Plugin::supportsFormatCombination(int32_t place, const nvinfer1::DynamicPluginTensorDesc* described,
                                       int32_t inputs_count, int32_t) noexcept {
    return guarded(getPluginName(), false, [&] {
        resolve(inputs_count);
        const nvinfer1::PluginTensorDesc& own = described[place].desc;
        if (own.format != nvinfer1::TensorFormat::kLINEAR) return false;
        if (place == 0) return is_float(own.type);
        if (place < inputs_count && rule(place).shape == Shape::kCondition) return is_condition(own.type);
        return own.type == described[0].desc.type;
    });
}

int32_t Plugin::configurePlugin(const nvinfer1::DynamicPluginTensorDesc* inputs, int32_t inputs_count,
                                const nvinfer1::DynamicPluginTensorDesc*, int32_t) noexcept {
    return guarded(getPluginName(), 1, [&] {
        resolve(inputs_count);
        std::vector<Dims> dims;
        for (int i = 0; i < inputs_count; ++i) dims.push_back(inputs[i].desc.dims);
        check_shapes(dims);
        return 0;
    });
}

const char* Plugin::getMetadataString() noexcept {
    return guarded<const char*>(getPluginName(), nullptr, [&] {
        metadata_ =
            std::string(getPluginName()) + "(" + fields_.text("inputs") + ") -> " + fields_.text("outputs");
        return metadata_.c_str();
    });
}

int32_t Plugin::onShapeChange(const nvinfer1::PluginTensorDesc* inputs, int32_t inputs_count,
                              const nvinfer1::PluginTensorDesc*, int32_t) noexcept {
    return guarded(getPluginName(), 1, [&] {
        resolve(inputs_count);
        std::vector<Dims> dims;
        for (int i = 0; i < inputs_count; ++i) dims.push_back(inputs[i].dims);
        check_shapes(dims);
        return 0;
    });
}

int32_t Plugin::enqueue(const nvinfer1::PluginTensorDesc* input_descs, const nvinfer1::PluginTensorDesc*,
                        const void* const* inputs, void* const* outputs, void*,
                        cudaStream_t stream) noexcept {
    return guarded(getPluginName(), 1, [&] {
        if (places_.empty()) throw Error("is run before its inputs were configured");
        Call call{};
        const Dims& main = input_descs[0].dims;
        call.type = kernel_type(input_descs[0].type);
        call.columns = main.nbDims ? main.d[main.nbDims - 1] : 1;
        call.rows = 1;
        for (int i = 0; i + 1 < main.nbDims; ++i) call.rows *= main.d[i];
        call.stream = stream;
        call.inputs.resize(declaration_->inputs.size());
        call.described.resize(declaration_->inputs.size());
        call.outputs.resize(declaration_->outputs.size());
        for (size_t i = 0; i < places_.size(); ++i) {
            call.inputs[places_[i]] = inputs[i];
            call.described[places_[i]] = &input_descs[i];
        }
        for (size_t i = 0; i < output_places_.size(); ++i) call.outputs[output_places_[i]] = outputs[i];
        if (call.rows == 0 || call.columns == 0) return 0;
        const cudaError_t status = launch(call);
        if (status != cudaSuccess) {
            throw Error(std::string("cannot run on shape ") + show(main) + ": " + cudaGetErrorString(status));
        }
        return 0;
    });
}

const nvinfer1::PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
    return guarded<const nvinfer1::PluginFieldCollection*>(getPluginName(), nullptr,
                                                           [&] { return fields_.serialised(); });
}

Creator::Creator(const Declaration& declaration, Make make) : declaration_(declaration), make_(make) {
    for (const FieldRule& rule : all_fields(declaration)) {
        fields_.emplace_back(rule.name, nullptr, type_of(rule.kind), 1);
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
}

nvinfer1::IPluginV3* Creator::createPlugin(const char*, const nvinfer1::PluginFieldCollection* fields,
                                           nvinfer1::TensorRTPhase) noexcept {
    return guarded<nvinfer1::IPluginV3*>(declaration_.name, nullptr, [&] { return make_(fields); });
}

}  // namespace trtfuse
