"""The engines that `peers.py` compares, a module each, and what they share.

base.py says what an engine must be able to do; octavo.py, llama_cpp.py and openvino.py do it;
worker.py, serving.py and watch.py are how; results.py is the arithmetic of the table.
"""
