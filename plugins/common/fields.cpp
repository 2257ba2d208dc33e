#include "fields.h"

#include <cstring>

#include "report.h"

namespace trtfuse {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldType;

Error wrong_type(const PluginField& field, FieldKind kind) {
    return Error(std::string("field '") + field.name + "' must be " + kind_name(kind) +
                 ", not of TensorRT's field type " + std::to_string(static_cast<int>(field.type)) + " with " +
                 std::to_string(field.length) + " values");
}

std::string read_text(const PluginField& field) {
    if (field.type != PluginFieldType::kCHAR) throw wrong_type(field, FieldKind::kText);
    if (field.data == nullptr || field.length <= 0) return {};
    const char* text = static_cast<const char*>(field.data);
    return std::string(text, strnlen(text, field.length));  // some callers count the final zero, some do not
}

double read_number(const PluginField& field, FieldKind kind) {
    if (field.data == nullptr || field.length != 1) throw wrong_type(field, kind);
    const auto as = [&](auto zero) {
        std::memcpy(&zero, field.data, sizeof(zero));
        return static_cast<double>(zero);
    };
    switch (field.type) {
        case PluginFieldType::kINT32:
            return as(int32_t{});
        case PluginFieldType::kINT64:
            return as(int64_t{});
        case PluginFieldType::kFLOAT32:
            if (kind == FieldKind::kFloat) return as(float{});
            break;
        case PluginFieldType::kFLOAT64:
            if (kind == FieldKind::kFloat) return as(double{});
            break;
        default:
            break;
    }
    throw wrong_type(field, kind);
}

}  // namespace

const char* kind_name(FieldKind kind) noexcept {
    return kind == FieldKind::kText ? "text" : kind == FieldKind::kFloat ? "float" : "int";
}

PluginFieldType type_of(FieldKind kind) noexcept {
    return kind == FieldKind::kText    ? PluginFieldType::kCHAR
           : kind == FieldKind::kFloat ? PluginFieldType::kFLOAT32
                                       : PluginFieldType::kINT32;
}

Fields::Fields(const std::vector<FieldRule>& rules, const nvinfer1::PluginFieldCollection* given) {
    for (const FieldRule& rule : rules) {
        Value value{rule.name, rule.kind, rule.text, static_cast<float>(rule.number),
                    static_cast<int32_t>(rule.number)};
        const int count = given != nullptr ? given->nbFields : 0;
        for (int i = 0; i < count; ++i) {
            const PluginField& field = given->fields[i];
            if (field.name == nullptr || std::strcmp(field.name, rule.name) != 0) continue;
            if (rule.kind == FieldKind::kText) {
                value.text = read_text(field);
            } else {
                const double number = read_number(field, rule.kind);
                value.real = static_cast<float>(number);
                value.whole = rule.kind == FieldKind::kInt ? static_cast<int32_t>(number) : 0;
            }
        }
        values_.push_back(std::move(value));
    }
}

Fields::Value& Fields::of(const char* name) {
    for (Value& value : values_) {
        if (std::strcmp(value.name, name) == 0) return value;
    }
    throw Error(std::string("no field '") + name + "' is declared");
}

const nvinfer1::PluginFieldCollection* Fields::serialised() {
    fields_.clear();
    for (const Value& value : values_) {
        switch (value.kind) {
            case FieldKind::kText:
                fields_.emplace_back(value.name, value.text.c_str(), PluginFieldType::kCHAR,
                                     static_cast<int32_t>(value.text.size()) + 1);
                break;
            case FieldKind::kFloat:
                fields_.emplace_back(value.name, &value.real, PluginFieldType::kFLOAT32, 1);
                break;
            case FieldKind::kInt:
                fields_.emplace_back(value.name, &value.whole, PluginFieldType::kINT32, 1);
                break;
        }
    }
    collection_ = {static_cast<int32_t>(fields_.size()), fields_.data()};
    return &collection_;
}

}  // namespace trtfuse
