"""EAGLE's token tree: building it from the draft's choices, and the target's greedy walk through it.

A request's tree has n nodes. Node 0 is the last committed token; node i > 0 is the draft's choice `selected_index[i -
1]`, numbered over all choices of all steps. A choice's number // topk is the entry in `parent_list` that names its
parent; 0 there means the root.
"""

from torch import Tensor


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    nodes: int,
    mask_mode: int,
) -> None:
    """Fill each request's mask [n, n] (a node sees itself, its ancestors and the root), positions and links.

    `retrieve_next_token` links a node to its first child, `retrieve_next_sibling` a child to the next; -1 ends a list.
    """
    assert int(mask_mode) == 1, "SGLang on a CPU builds masks over the tree's own nodes only"
    masks, node_positions = tree_mask.view(-1, nodes, nodes), positions.view(-1, nodes)
    for request, length in enumerate(seq_lens.tolist()):
        parents = node_parents(selected_index[request].tolist(), parent_list[request].tolist(), topk, nodes)
        for node in range(nodes - 1, 0, -1):
            retrieve_next_sibling[request, node] = retrieve_next_token[request, parents[node]]
            retrieve_next_token[request, parents[node]] = node
        masks[request] = False
        for node in range(nodes):
            retrieve_index[request, node] = request * nodes + node
            path = [node]
            while path[-1] != 0:
                path.append(parents[path[-1]])
            masks[request, node, path] = True
            node_positions[request, node] = length + len(path) - 1


def node_parents(selected: list[int], parent_list: list[int], topk: int, nodes: int) -> list[int]:
    """The parent node of every node; the root is its own parent."""
    parents = [0]
    for choice in selected[: nodes - 1]:
        entry = choice // topk
        parents.append(0 if entry == 0 else selected.index(parent_list[entry]) + 1)
    return parents


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Walk from the root to the child that the target predicts, as long as there is one, and record the path.

    `predicts` gets the target's token at every node of the path, `accept_index` the nodes, and `accept_token_num` how
    many of the nodes the draft proposed. The names of the arguments are SGLang's.
    """
    predicted = target_predict.reshape(-1).tolist()
    for request in range(candidates.shape[0]):
        node = 0
        accepted = 0
        while True:
            place = int(retrive_index[request, node])
            accept_index[request, accepted] = place
            predicts[place] = predicted[place]
            if accepted + 1 == accept_index.shape[1]:
                break
            node = int(retrive_next_token[request, node])
            while node != -1 and int(candidates[request, node]) != predicted[place]:
                node = int(retrive_next_sibling[request, node])
            if node == -1:
                break
            accepted += 1
        accept_token_num[request] = accepted
