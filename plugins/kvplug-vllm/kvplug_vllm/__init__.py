"""kvplug connectors in vLLM. :mod:`kvplug_vllm.connector` is the class that vLLM calls.

A request that loads KV, and the calls about it::

    KvplugConnectorScheduler                        KvplugConnectorWorker

    get_num_new_matched_tokens    match: how many tokens the connector can load; None: ask again
      v
    update_state_after_alloc      allocate: the blocks to load into
      v
    build_connector_meta ---- metadata ---->        handle_preemptions, bind_connector_metadata
                                                      v
                                                    start_load_kv          load, in each step:
                                                    wait_for_layer_load    before a layer's attention
                                                    save_kv_layer          after it
                                                    wait_for_save          after the forward pass
                                                      v
                                                    get_finished           sent and received requests
    update_connector_output <---- output ----       get_block_ids_with_load_errors
      v
    request_finished              True: vLLM keeps the blocks until get_finished reports the request

Since vLLM 0.30, ``get_transfer_results`` replaces ``get_finished`` and also reports failed requests.
"""
