// Plays TensorRT to a plugin library: makes plugins from fields, asks for shapes and formats, reads messages.
// Needs neither TensorRT nor a GPU. Ends with 0, or says what is wrong.
#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using namespace nvinfer1;

namespace {

struct Logger : ILogger {
    std::string last;
    void log(Severity, const char* message) noexcept override { last = message; }
} logger;

struct Finder : ILoggerFinder {
    ILogger* findLogger() override { return &logger; }
} finder;

void check(bool good, const std::string& what) {
    if (good) return;
    std::printf("wrong: %s (last message: '%s')\n", what.c_str(), logger.last.c_str());
    std::exit(1);
}

IPluginCreatorV3One* creator_of(IPluginCreatorInterface* const* all, int32_t count, const char* name) {
    for (int32_t i = 0; i < count; ++i) {
        auto* creator = static_cast<IPluginCreatorV3One*>(all[i]);
        if (std::strcmp(creator->getPluginName(), name) == 0) return creator;
    }
    check(false, std::string("no creator ") + name);
    return nullptr;
}

PluginField text(const char* name, const char* value) {
    return PluginField(name, value, PluginFieldType::kCHAR, static_cast<int32_t>(std::strlen(value)));
}

IPluginV3* make(IPluginCreatorV3One* creator, std::vector<PluginField> fields) {
    logger.last.clear();
    const PluginFieldCollection collection{static_cast<int32_t>(fields.size()), fields.data()};
    return creator->createPlugin("node", &collection, TensorRTPhase::kBUILD);
}

IPluginV3OneBuild* build(IPluginV3* plugin) {
    return static_cast<IPluginV3OneBuild*>(plugin->getCapabilityInterface(PluginCapabilityType::kBUILD));
}

IPluginV3OneRuntime* runtime(IPluginV3* plugin) {
    return static_cast<IPluginV3OneRuntime*>(plugin->getCapabilityInterface(PluginCapabilityType::kRUNTIME));
}

DynamicPluginTensorDesc tensor(std::vector<int64_t> shape, DataType type) {
    DynamicPluginTensorDesc described{};
    described.desc.type = type;
    described.desc.format = TensorFormat::kLINEAR;
    described.desc.dims.nbDims = static_cast<int32_t>(shape.size());
    for (size_t i = 0; i < shape.size(); ++i) described.desc.dims.d[i] = shape[i];
    return described;
}

bool mentions(const char* text) { return logger.last.find(text) != std::string::npos; }

void skip_layer_norm(IPluginCreatorV3One* creator) {
    const double epsilon = 1e-3;
    const PluginField wide("epsilon", &epsilon, PluginFieldType::kFLOAT64, 1);
    IPluginV3* plugin =
        make(creator, {wide, text("inputs", "x skip scale preset"), text("outputs", "y sum")});
    check(plugin != nullptr, "a plugin with all fields");
    check(build(plugin)->getNbOutputs() == 2, "two outputs");

    std::vector<DynamicPluginTensorDesc> io = {
        tensor({-1, 128, 768}, DataType::kHALF), tensor({-1, 128, 768}, DataType::kHALF),
        tensor({768}, DataType::kHALF),          tensor({1, 1, 768}, DataType::kHALF),
        tensor({-1, 128, 768}, DataType::kHALF), tensor({-1, 128, 768}, DataType::kHALF)};
    for (int32_t i = 0; i < 6; ++i)
        check(build(plugin)->supportsFormatCombination(i, io.data(), 4, 2), "fp16");
    check(build(plugin)->configurePlugin(io.data(), 4, io.data() + 4, 2) == 0, "configured");
    io[2].desc.type = DataType::kFLOAT;
    check(!build(plugin)->supportsFormatCombination(2, io.data(), 4, 2), "scale of another type");
    io[1].desc.dims.d[1] = 64;
    check(build(plugin)->configurePlugin(io.data(), 4, io.data() + 4, 2) != 0, "skip of another shape");
    check(mentions("TrtfuseSkipLayerNorm: input 'skip' of shape (-1, 64, 768)"),
          "message that names the input");
    check(build(plugin)->configurePlugin(io.data(), 3, io.data() + 3, 2) != 0, "three inputs for four names");

    const PluginFieldCollection* saved = runtime(plugin)->getFieldsToSerialize();
    IPluginV3* again = creator->createPlugin("node", saved, TensorRTPhase::kRUNTIME);
    check(again != nullptr, "a plugin from its own fields");
    IPluginV3* copy = again->clone();
    check(copy != nullptr && build(copy)->getNbOutputs() == 2, "a clone");
    bool found = false;
    const PluginFieldCollection* fields = runtime(copy)->getFieldsToSerialize();
    for (int32_t i = 0; i < fields->nbFields; ++i) {
        if (std::strcmp(fields->fields[i].name, "epsilon") != 0) continue;
        found = *static_cast<const float*>(fields->fields[i].data) == 1e-3f;
    }
    check(found, "epsilon survives");
    for (IPluginV3* each : {plugin, again, copy}) delete each;

    check(make(creator, {text("epsilon", "small")}) == nullptr && mentions("field 'epsilon' must be float"),
          "type");
    check(make(creator, {text("inputs", "x skip scale other")}) == nullptr && mentions("'other'"),
          "unknown input");
    check(make(creator, {text("inputs", "x scale")}) == nullptr && mentions("'skip' is missing"),
          "missing input");
    check(make(creator, {text("outputs", "sum")}) == nullptr && mentions("begin with 'y'"), "outputs");
}

void bias_act(IPluginCreatorV3One* creator) {
    IPluginV3* plugin = make(creator, {});
    check(plugin != nullptr, "a plugin of defaults");
    std::vector<DynamicPluginTensorDesc> io = {tensor({4, 8}, DataType::kBF16), tensor({1}, DataType::kBF16),
                                               tensor({4, 8}, DataType::kBF16)};
    check(build(plugin)->configurePlugin(io.data(), 2, io.data() + 2, 1) == 0, "inputs by their number");
    delete plugin;
    check(make(creator, {text("activation", "swoosh")}) == nullptr && mentions("one of relu"), "activation");
    const float half = 0.5f;
    const PluginField wrong("activation", &half, PluginFieldType::kFLOAT32, 1);
    check(make(creator, {wrong}) == nullptr && mentions("field 'activation' must be text"),
          "activation's type");
}

void softmax(IPluginCreatorV3One* creator) {
    const int64_t keep = 0;
    const PluginField field("keep", &keep, PluginFieldType::kINT64, 1);
    IPluginV3* plugin = make(creator, {field, text("inputs", "x condition")});
    check(plugin != nullptr, "a softmax with a condition");
    std::vector<DynamicPluginTensorDesc> io = {tensor({2, 3, 5, 5}, DataType::kFLOAT),
                                               tensor({2, 1, 1, 5}, DataType::kBOOL),
                                               tensor({2, 3, 5, 5}, DataType::kFLOAT)};
    for (int32_t i = 0; i < 3; ++i)
        check(build(plugin)->supportsFormatCombination(i, io.data(), 2, 1), "bool");
    check(build(plugin)->configurePlugin(io.data(), 2, io.data() + 2, 1) == 0, "condition that broadcasts");
    io[1].desc.dims.d[3] = 4;
    check(build(plugin)->configurePlugin(io.data(), 2, io.data() + 2, 1) != 0 && mentions("broadcast"),
          "mask");
    delete plugin;
}

}  // namespace

int main(int argc, char** argv) {
    void* library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
    check(library != nullptr, "the library does not load");
    using GetCreators = IPluginCreatorInterface* const* (*)(int32_t&);
    const auto get = reinterpret_cast<GetCreators>(dlsym(library, "getCreators"));
    const auto set = reinterpret_cast<void (*)(ILoggerFinder*)>(dlsym(library, "setLoggerFinder"));
    check(get != nullptr && set != nullptr, "the entry points are missing");
    set(&finder);
    int32_t count = 0;
    IPluginCreatorInterface* const* all = get(count);
    skip_layer_norm(creator_of(all, count, "TrtfuseSkipLayerNorm"));
    bias_act(creator_of(all, count, "TrtfuseBiasAct"));
    softmax(creator_of(all, count, "TrtfuseSoftmax"));
    set(nullptr);
    return 0;
}
