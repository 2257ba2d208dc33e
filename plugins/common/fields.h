// A plugin's fields: read from TensorRT's, with defaults, and written back into the engine.
#pragma once

#include <NvInferRuntime.h>

#include <string>
#include <vector>

namespace trtfuse {

enum class FieldKind { kText, kFloat, kInt };

/// A field as a plugin declares it.
struct FieldRule {
    const char* name;
    FieldKind kind;
    std::string text;     // default of a text
    double number = 0.0;  // default of a number

    static FieldRule of_text(const char* name, const char* value) {
        return {name, FieldKind::kText, value, 0.0};
    }
    static FieldRule of_float(const char* name, double value) { return {name, FieldKind::kFloat, {}, value}; }
    static FieldRule of_int(const char* name, int value) {
        return {name, FieldKind::kInt, {}, double(value)};
    }
};

const char* kind_name(FieldKind kind) noexcept;
nvinfer1::PluginFieldType type_of(FieldKind kind) noexcept;

/// The values of declared fields.
class Fields {
 public:
    /// Those of `given`; a missing one has its default. Throws Error naming the field on a wrong type or an
    /// empty number; fields that are not declared are left alone (TensorRT adds its own).
    Fields(const std::vector<FieldRule>& rules, const nvinfer1::PluginFieldCollection* given);

    const std::string& text(const char* name) const { return of(name).text; }
    float number(const char* name) const { return of(name).real; }
    int integer(const char* name) const { return of(name).whole; }
    void set_text(const char* name, const std::string& text) { of(name).text = text; }

    /// For the engine; it points into this object until the next call or change.
    const nvinfer1::PluginFieldCollection* serialised();

 private:
    struct Value {
        const char* name;
        FieldKind kind;
        std::string text;
        float real;
        int32_t whole;
    };

    Value& of(const char* name);
    const Value& of(const char* name) const { return const_cast<Fields*>(this)->of(name); }

    std::vector<Value> values_;
    std::vector<nvinfer1::PluginField> fields_;
    nvinfer1::PluginFieldCollection collection_{};
};

}  // namespace trtfuse
