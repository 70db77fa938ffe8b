"""What the annotation page says, in English and Chinese."""

LANGUAGES = ("en", "zh")

TEXTS: dict[str, tuple[str, str]] = {
    # the page
    "title": ("What is the better reply?", "哪个回答更好？"),
    "label_tab": ("Rank", "排序"),
    "browse_tab": ("Browse", "浏览"),
    "score_tab": ("Score", "打分"),
    "language": ("Language", "语言"),
    "annotator": ("Your name", "你的名字"),
    "model": ("Model", "模型"),
    "source": ("Prompts from", "提示来源"),
    "prompt": ("Prompt (may be edited)", "提示（可编辑）"),
    "random": ("Random prompt (n)", "随机提示 (n)"),
    "random_plain": ("Random prompt", "随机提示"),
    "sample": ("Sample replies", "生成回答"),
    "settings": ("Model and sampling", "模型与采样"),
    "num_replies": ("Replies", "回答个数"),
    "temperature": ("Temperature", "温度"),
    "max_new_tokens": ("Tokens of a reply at most", "回答的最大长度（token）"),
    "ties": ("Replies may share a rank", "允许并列"),
    "advance": ("Go on to the next prompt after saving", "保存后自动进入下一个提示"),
    "rank_of": ("Rank of {reply}", "{reply} 的名次"),
    "reply": ("Reply", "回答"),
    "save": ("Save (Enter)", "保存 (Enter)"),
    "skip": ("Skip (s)", "跳过 (s)"),
    "all_bad": ("All bad (b)", "都不好 (b)"),
    "order": ("Order", "当前排序"),
    "keys": (
        "Keys: arrows mark a reply, digits give it a rank, Enter saves, s skips, b all bad, n next prompt.",
        "快捷键：方向键切换回答，数字键给选中的回答排名，Enter 保存，s 跳过，b 都不好，n 下一个提示。",
    ),
    "score_keys": (
        "Keys: arrows move the slider, 1 to 5 are -2 to 2, Enter saves, n next prompt.",
        "快捷键：方向键移动滑块，1 到 5 对应 -2 到 2，Enter 保存，n 下一个提示。",
    ),
    "score": ("Score, -2 is bad, 2 is good", "分数：-2 最差，2 最好"),
    "save_score": ("Save the score", "保存分数"),
    "filter": ("Filter", "筛选"),
    "everybody": ("everybody", "所有人"),
    "everything": ("everything", "全部"),
    "verdict": ("Verdict", "结论"),
    "search": ("Text in prompt or replies", "提示或回答中的文字"),
    "refresh": ("Show", "显示"),
    "number": ("Number", "编号"),
    "who": ("Annotator", "标注人"),
    "what": ("Judgement", "标注"),
    "prompt_short": ("Prompt", "提示"),
    "annotator_filter": ("Annotator", "标注人"),
    "best": ("Best reply", "最佳回答"),
    "seconds": ("Seconds", "用时（秒）"),
    "when": ("When", "时间"),
    "open": ("Open a judgement by its number, or click its row", "输入编号，或点击一行"),
    "open_button": ("Open", "打开"),
    "ranks": ("Ranks of the replies above in order, or a score", "按上面的顺序填写名次，或分数"),
    "save_edit": ("Save the change", "保存修改"),
    "delete": ("Delete", "删除"),
    "export": ("Export", "导出"),
    "counts": ("Who did what", "标注统计"),
    "ranked": ("ranked", "已排序"),
    "all_bad_verdict": ("all bad", "都不好"),
    "skipped": ("skipped", "跳过"),
    "scored": ("scored", "已打分"),
    "median_seconds": ("median seconds", "用时中位数（秒）"),
    # what went well
    "saved": ("Saved as number {number}.", "已保存，编号 {number}。"),
    "changed": ("Number {number} is changed; the old revision is kept.", "编号 {number} 已修改，旧版本保留。"),
    "deleted": ("Number {number} is deleted; its revisions are kept.", "编号 {number} 已删除，历史版本保留。"),
    "exported": (
        "Exported {rankings} rankings ({lists} lists) and {scores} scores to {folder}: {files}.",
        "已导出 {rankings} 个排序（{lists} 个列表）和 {scores} 个分数到 {folder}：{files}。",
    ),
    "next_step": (" Next: {command}", "下一步：{command}"),
    "agreement": (
        "{items} items ranked by more than one person: Kendall's tau-b {tau}, Krippendorff's alpha (ordinal) {alpha}",
        "{items} 个条目由多人排序：Kendall tau-b {tau}，Krippendorff alpha（序数）{alpha}",
    ),
    "no_agreement": ("No item has been ranked by more than one person yet.", "还没有由多人排序的条目。"),
    "shown": ("{count} shown of {total}", "共 {total} 条，显示 {count} 条"),
    "read": ("Read the replies and rank them, 1 is the best.", "阅读回答并排名，1 为最好。"),
    "read_one": ("Read the reply and score it.", "阅读回答并打分。"),
    "compare_title": ("Which reply is better?", "哪个回答更好？"),
    "compare_tab": ("Vote", "投票"),
    "result_tab": ("Result", "结果"),
    "start_voting": ("Start (n)", "开始 (n)"),
    "left": ("1 is better (1)", "1 更好 (1)"),
    "equal": ("Equal (0)", "一样好 (0)"),
    "right": ("2 is better (2)", "2 更好 (2)"),
    "both_bad": ("Both bad (b)", "都不好 (b)"),
    "vote_keys": (
        "Keys: 1 or left arrow, 2 or right arrow, 0 equal, b both bad, s skip, n start.",
        "快捷键：1 或左箭头，2 或右箭头，0 一样好，b 都不好，s 跳过，n 开始。",
    ),
    "votes_left": ("{done} of {count} judged. Which reply is better?", "已判断 {done} / {count}。哪个回答更好？"),
    "votes_done": ("All {count} pairs are judged. Thank you!", "全部 {count} 对已判断，谢谢！"),
    "write_report": ("Show the result and write the report", "显示结果并生成报告"),
    "reported": ("Written to {path}.", "已写入 {path}。"),
    # what did not
    "unranked": ("Not saved: {replies} still without a rank.", "未保存：{replies} 还没有名次。"),
    "rank_range": ("Not saved: ranks go from 1 to {count}.", "未保存：名次应在 1 到 {count} 之间。"),
    "rank_held": (
        "Rank {rank} is held by reply {reply} already; change that one first, or allow ties.",
        "名次 {rank} 已被回答 {reply} 占用；请先修改它，或允许并列。",
    ),
    "ranks_text": ("Give {count} ranks, such as 2, 1, 3.", "请填写 {count} 个名次，例如 2, 1, 3。"),
    "score_text": ("Give a score from -2 to 2.", "请填写 -2 到 2 之间的分数。"),
    "no_undo": ("There is no step that could be taken back.", "没有可以撤销的步骤。"),
    "no_item": ("There is no item {number}.", "没有条目 {number}。"),
    "judged_before": (
        "Not saved: you judged this item before, as number {number}; change it in the second tab.",
        "未保存：你已标注过该条目（编号 {number}）；请在第二个标签页中修改。",
    ),
    "voted_before": (
        "Not saved: you judged that pair before, as number {number}.",
        "未保存：你已判断过那一对（编号 {number}）。",
    ),
    "gone": ("Not saved: number {number} is deleted, or never was.", "未保存：编号 {number} 已删除或不存在。"),
    "stale": (
        "Not saved: {author} has changed number {number} meanwhile (revision {revision}); open it again and look.",
        "未保存：{author} 已修改编号 {number}（版本 {revision}）；请重新打开查看。",
    ),
    "other_kind": ("Not saved: a score stays a score, and a ranking a ranking.", "未保存：打分与排序不能互换。"),
    "no_fit": ("Not saved: this does not fit the replies of item {number}.", "未保存：与条目 {number} 的回答不符。"),
    "not_text": ("Not saved: this holds characters that are no text.", "未保存：含有无法存储的字符。"),
    "busy": (
        "Not saved: another program holds the database ({reason}). Wait a moment and save again.",
        "未保存：数据库正被其他程序占用（{reason}）。请稍后再保存。",
    ),
    "not_stored": (
        "Not saved: the database cannot be written ({reason}). Make room or call whoever runs this server.",
        "未保存：无法写入数据库（{reason}）。请清理磁盘空间或联系管理员。",
    ),
    "nothing_to_judge": ("Not saved: there is nothing on the page yet; take a prompt first.", "未保存：请先获取提示。"),
    "no_name": ("Say who you are first: your name is empty.", "请先填写你的名字。"),
    "name_length": (
        "A name has at most {limit} characters, on one line, and does not begin with judge:.",
        "名字最多 {limit} 个字符，不能换行，也不能以 judge: 开头。",
    ),
    "no_prompt": ("There is no prompt: write one, or take a random one.", "没有提示：请输入或随机获取一个。"),
    "prompt_length": (
        "The prompt has {length} characters; at most {limit} are taken. Shorten it.",
        "提示有 {length} 个字符，最多 {limit} 个。请缩短。",
    ),
    "prompt_tokens": (
        "The prompt has {length} tokens; with {reply} for a reply, the model takes {limit}. Shorten it.",
        "提示有 {length} 个 token，加上回答 {reply} 个，模型最多 {limit} 个。请缩短。",
    ),
    "no_source": ("No file of prompts was given; write a prompt instead.", "没有提示文件；请输入提示。"),
    "bad_source": ("The prompts cannot be read: {reason}", "无法读取提示：{reason}"),
    "no_model": ("No model was given; start the server with --models.", "没有模型；请用 --models 启动服务器。"),
    "bad_model": ("The model cannot be loaded: {reason}", "无法加载模型：{reason}"),
    "bad_sampling": ("The model could not reply: {reason}", "模型无法回答：{reason}"),
    "few_replies": (
        "The model gave {count} different replies, and {needed} are needed; raise the temperature, or take another"
        " prompt.",
        "模型只给出 {count} 个不同的回答，需要 {needed} 个；请提高温度或换一个提示。",
    ),
    "no_rows": (
        "Nothing to export yet: no ranking prefers one reply to another, and no reply is scored.",
        "还没有可导出的内容：没有任何排序分出高下，也没有打分。",
    ),
    "bad_export": ("The export failed: {reason}", "导出失败：{reason}"),
    "unexpected": ("Something went wrong ({reason}); nothing was saved.", "出错了（{reason}），未保存任何内容。"),
}


def say(language: str, key: str, **values: object) -> str:
    """A text of the page; `values` fill its braces."""
    return TEXTS[key][LANGUAGES.index(language) if language in LANGUAGES else 0].format(**values)


class Refusal(ValueError):
    """Something that a person asked for and cannot have; the message is English, `in_language` gives it in another."""

    def __init__(self, key: str, **values: object) -> None:
        super().__init__(say("en", key, **values))
        self.key, self.values = key, values

    def in_language(self, language: str) -> str:
        """The message in a language of the page."""
        return say(language, self.key, **self.values)
