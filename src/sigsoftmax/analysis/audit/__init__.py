"""The parts of an audit of an output layer: unreachable classes, nonlinearity of phi, truncation, gradients."""
