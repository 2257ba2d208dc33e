// What the library exports: the two functions that TensorRT calls in a plugin library, and a description of
// it all for those who have no TensorRT at hand.
#include "library.h"

#include <cmath>
#include <sstream>

#include "common/export.h"

namespace trtfuse {
namespace {

Creator* const* creators(int32_t& count) {
    static Creator* const all[] = {
        &bias_act_creator(), &gated_act_creator(),     &layer_norm_creator(), &skip_layer_norm_creator(),
        &rms_norm_creator(), &skip_rms_norm_creator(), &softmax_creator(),
    };
    count = sizeof(all) / sizeof(all[0]);
    return all;
}

std::string quoted(const std::string& text) { return "\"" + text + "\""; }

std::string number(double value) {
    if (std::isinf(value)) return value > 0 ? "Infinity" : "-Infinity";  // as Python's json reads it
    std::ostringstream stream;
    stream.precision(9);
    stream << value;
    return stream.str();
}

/// The elements of a list as JSON, each by `show`.
template <typename List, typename Show>
std::string array(const List& list, Show show) {
    std::string text;
    for (const auto& each : list) text += (text.empty() ? "" : ", ") + show(each);
    return "[" + text + "]";
}

std::string describe(Creator& creator) {
    const Declaration& declaration = creator.declaration();
    const auto input = [](const InputRule& rule) {
        return "{\"name\": " + quoted(rule.name) + ", \"optional\": " + (rule.optional ? "true" : "false") +
               "}";
    };
    const auto output = [](const char* name) { return quoted(name); };
    const auto field = [](const FieldRule& rule) {
        return "{\"name\": " + quoted(rule.name) + ", \"kind\": " + quoted(kind_name(rule.kind)) +
               ", \"default\": " +
               (rule.kind == FieldKind::kText ? quoted(rule.text) : number(static_cast<float>(rule.number))) +
               "}";
    };
    const auto creator_field = [](const nvinfer1::PluginField& f) { return quoted(f.name); };
    const nvinfer1::PluginFieldCollection& fields = *creator.getFieldNames();
    const std::vector<nvinfer1::PluginField> list(fields.fields, fields.fields + fields.nbFields);
    return "{\"name\": " + quoted(creator.getPluginName()) +
           ", \"version\": " + quoted(creator.getPluginVersion()) +
           ", \"namespace\": " + quoted(creator.getPluginNamespace()) +
           ", \"inputs\": " + array(declaration.inputs, input) +
           ", \"outputs\": " + array(declaration.outputs, output) +
           ", \"fields\": " + array(all_fields(declaration), field) +
           ", \"creator_fields\": " + array(list, creator_field) + "}";
}

}  // namespace
}  // namespace trtfuse

/// TensorRT: the creators in this library.
extern "C" TRTFUSE_EXPORT nvinfer1::IPluginCreatorInterface* const* getCreators(int32_t& count) {
    static std::vector<nvinfer1::IPluginCreatorInterface*> all = [] {
        int32_t n = 0;
        trtfuse::Creator* const* list = trtfuse::creators(n);
        return std::vector<nvinfer1::IPluginCreatorInterface*>(list, list + n);
    }();
    count = static_cast<int32_t>(all.size());
    return all.data();
}

/// TensorRT: where to find its logger.
extern "C" TRTFUSE_EXPORT void setLoggerFinder(nvinfer1::ILoggerFinder* finder) {
    trtfuse::set_logger_finder(finder);
}

/// JSON: the TensorRT headers and architectures that the library was built for, and every creator.
extern "C" TRTFUSE_EXPORT const char* trtfuse_describe() {
    return trtfuse::guarded<const char*>("trtfuse_describe", "", [] {
        static const std::string text = [] {
            int32_t n = 0;
            trtfuse::Creator* const* list = trtfuse::creators(n);
            const std::string version =
                std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR);
            const std::vector<trtfuse::Creator*> all(list, list + n);
            return "{\"tensorrt\": " + trtfuse::quoted(version) +
                   ", \"architectures\": " + trtfuse::quoted(TRTFUSE_ARCHITECTURES) + ", \"plugins\": " +
                   trtfuse::array(all, [](trtfuse::Creator* c) { return trtfuse::describe(*c); }) + "}";
        }();
        return text.c_str();
    });
}
