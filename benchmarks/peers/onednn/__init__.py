"""oneDNN: the primitive ``batch_normalization_backward``, and Graph's ``BatchNormTrainingBackprop``."""
