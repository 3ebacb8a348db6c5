"""Writes a GGUF file's twin with every weight as f32. Usage: dequantise.py IN OUT (needs the gguf package)."""
import sys

import gguf

source = gguf.GGUFReader(sys.argv[1])
target = gguf.GGUFWriter(sys.argv[2], source.get_field("general.architecture").contents())
for field in source.fields.values():
    if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type", "general.quantization_version"):
        continue
    kind = field.types[0]
    element = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    target.add_key_value(field.name, field.contents(), kind, element)
target.add_file_type(gguf.LlamaFileType.ALL_F32)
for tensor in source.tensors:
    target.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
target.write_header_to_file()
target.write_kv_data_to_file()
target.write_tensors_to_file()
target.close()
