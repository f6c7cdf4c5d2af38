"""The patched model: its forward pass, its loss, and how it notices when another library replaces them."""
