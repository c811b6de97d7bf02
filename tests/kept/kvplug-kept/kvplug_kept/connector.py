"""The two sides of a connector that moves nothing."""

from kvplug.engine import SchedulerConnector, WorkerConnector


class Scheduler(SchedulerConnector):
    def __init__(self, context):
        self.context = context
        self.calls = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append(("match", request.request_id, len(request.token_ids)))
        return 0, False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.calls.append(("alloc", request.request_id, block_ids, num_external_tokens))

    def build_connector_meta(self, output):
        return {
            "step": output.step,
            "requests": [
                [each.request_id, each.num_computed_tokens, each.num_scheduled_tokens]
                for each in output.scheduled
            ],
        }

    def update_connector_output(self, output):
        self.calls.append(("output", sorted(output.invalid_block_ids)))

    def request_finished(self, request, block_ids, end):
        self.calls.append(("finished", request.request_id, str(end)))
        return False, None

    def shutdown(self):
        self.context.close()


class Worker(WorkerConnector):
    def __init__(self, context):
        super().__init__()
        self.context = context
        self.layers = []

    def register_kv_caches(self, kv_caches):
        (group,) = self.context.cache.groups
        self.layers = [name for name in group.layer_names if name in kv_caches]

    def start_load_kv(self):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer):
        pass

    def wait_for_save(self):
        pass

    def get_finished(self, finished_request_ids):
        return frozenset(), frozenset()

    def get_block_ids_with_load_errors(self):
        return frozenset()

    def shutdown(self):
        self.context.close()
