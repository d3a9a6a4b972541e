"""Documents that a rule drops, code, HTML, and text with private data. All written for the fixture.

The first element of a broken document is the reason, as the quality step gives it.
"""

# ruff: noqa: E501  a line is a text

from __future__ import annotations

_EN = (
    "The boat left the harbour before sunrise, and nobody on the pier knew when it would be back. "
    "Two fishermen were mending their nets and talking about the weather, which had been bad for a week. "
    "A girl with a basket of bread walked from one to the other and sold what she had baked that morning. "
    "By noon the wind had turned, and the first sails could be seen again near the rocks in the west."
)
_ZH = (
    "天还没亮，船就离开了港口，码头上没有人知道它什么时候回来。两个渔夫一边补网，一边谈论着坏了一个星期的天气。"
    "一个提着面包篮子的女孩从这个人走到那个人，卖她早上烤好的面包。到了中午，风向变了，西边的礁石附近又能看见第一批船帆。"
)
_JA = (
    "夜明け前に船は港を出て、いつ戻るのか桟橋の人は誰も知らなかった。二人の漁師が網を直しながら、一週間も続く悪い天気の話をしていた。"
    "パンのかごを持った女の子が人から人へ歩き、その朝に焼いたものを売っていた。昼には風が変わり、西の岩の近くにまた帆が見えてきた。"
)
_MENU_EN = "\n".join(["Home", "About us", "Products", "News", "Contact", "Careers", "Press", "Shop", "Blog", "Search", "Help", "Sitemap",
                      "Terms", "Privacy", "Register", "Sign in", "My account", "Basket", "Delivery", "Returns", "Gift cards", "Stores",
                      "Opening hours", "Customer service", "Frequently asked questions", "Size guide", "Payment", "Follow the news",
                      "Subscribe to the letter", "Have a look", "Back to top", "Next page", "Previous page", "Print this page"])
_NAV_ZH = "\n".join(["首页", "关于我们", "产品中心", "新闻动态", "联系我们", "人才招聘", "在线留言", "下载中心", "网站地图", "会员登录", "免费注册", "购物车",
                     "我的订单", "帮助中心", "售后服务", "友情链接", "版权声明", "隐私政策", "返回顶部", "上一页", "下一页", "收藏本站", "客服热线", "意见反馈"])

BROKEN: list[tuple[str, str | None, str]] = [
    ("too few words", "en", "Page not found. Please go back."),
    ("too few words", "en", "The shop is closed today. We will be back on Monday with fresh bread and cakes."),
    ("too few words", "zh", "对不起，您访问的页面不存在，请返回首页。"),
    ("too few words", "ja", "お探しのページは見つかりませんでした。"),
    ("too few words", "de", "Die Seite wurde nicht gefunden. Bitte gehen Sie zurück."),
    ("words too short on average", "en", " ".join("a b c d e f g h i j of to be I a x y is at q r s t u v w x y z".split() * 2) + "."),
    ("words too long on average", "en", " ".join(f"internationalization{c}standardization" for c in "abcdefghijklmnopqrstuvwxyz" * 2) + " that of."),
    ("too many hash signs", "en", _EN.replace("the ", "#the ").replace("a ", "#a ").replace("and", "#and").replace("was", "#was") + " #sea #boat #wind #bread."),
    ("too many ellipses", "en", _EN.replace(",", "...").replace(" the ", "... the ").replace(" a ", "... a ")),
    ("too many lines that begin with a bullet", "en", "\n".join(f"• {s}." for s in _EN.replace(", ", ". ").rstrip(".").split(". "))),
    ("too many lines that begin with a bullet", "zh", "\n".join(f"● {s}。" for s in _ZH.replace("，", "。").rstrip("。").split("。"))),
    ("too many lines that end with an ellipsis", "en", "\n".join(f"{s}..." for s in _EN.rstrip(".").split(". "))),
    ("too many lines that end with an ellipsis", "zh", "\n".join(f"{s}……" for s in _ZH.rstrip("。").split("。"))),
    ("too many lines that end with an ellipsis", "ja", "\n".join(f"{s}…" for s in _JA.rstrip("。").split("。"))),
    ("too few words with a letter", "en", "The score of the day: " + " ".join(f"{n}-{n * 7 % 11}" for n in range(40)) + " and to be " + _EN[:140] + "."),
    ("too few stop words", "en", " ".join(f"cheap {w} sale online discount {w} shop buy now" for w in
        "shoes boots sandals slippers sneakers loafers trainers clogs".split()).title() + "."),
    ("too few stop words", "en", "Sofia Chairs Tables Lamps Mirrors Curtains Carpets Cushions Shelves Drawers Cupboards Wardrobes Stools Benches Beds "
        "Blankets Pillows Towels Kettles Toasters Ovens Fridges Freezers Washers Dryers Irons Vacuums Brooms Buckets Hammers Nails Screws Drills "
        "Saws Ladders Paints Brushes Tiles Pipes Taps Sinks Baths Showers Hoses Rakes Spades Seeds Pots Fences Gates Hinges Locks."),
    ("too few stop words", "zh", "手机壳 充电器 数据线 耳机 音箱 键盘 鼠标 显示器 路由器 摄像头 打印机 扫描仪 投影仪 硬盘 内存条 显卡 主板 电源 机箱 散热器 电池 台灯 风扇 "
        "空调 冰箱 洗衣机 电视机 微波炉 电饭煲 豆浆机 榨汁机 吸尘器 净水器 加湿器。"),
    ("too many duplicate lines", "en", "\n".join([_EN.split(". ")[0] + ".", "Click here to read the next page of this story.", _EN.split(". ")[1] + ".",
        "Click here to read the next page of this story.", _EN.split(". ")[2] + ".", "Click here to read the next page of this story.",
        "Click here to read the next page of this story.", "Click here to read the next page of this story."])),
    ("too many duplicate lines", "zh", "\n".join(x for s in _ZH.rstrip("。").split("。") for x in (s + "。", "点击这里阅读全文。"))
        + "\n点击这里阅读全文。\n点击这里阅读全文。"),
    ("too many duplicate lines", "ja", "\n".join(x for s in _JA.rstrip("。").split("。") for x in (s + "。", "続きを読むにはここを押してください。"))
        + "\n続きを読むにはここを押してください。\n続きを読むにはここを押してください。"),
    ("too many duplicate lines", "en", f"{_EN}\n\nAll rights are reserved by the owner of the site.\n\nThe sea was calm that day.\n\n"
        "All rights are reserved by the owner of the site.\n\nAll rights are reserved by the owner of the site."),
    ("duplicate lines are too much of the text", "en", "\n".join([_EN, *(f"{c} short line that is here only once." for c in "ABCDEFG"), _EN])),
    ("a 2-gram is too much of the text", "en", "We have the best offers in the town. " + "Cheap flights cheap flights. " * 9 +
        "Look at all of the places that you have never been to, and call us before the end of the month to get a price that is good."),
    ("a 4-gram is too much of the text", "en", "The owner of the house on the hill had a dog, and "
        "the owner of the mill by the river had a cat with a long tail. " + "Nobody may enter the garden of the palace after the gates have been closed. "
        "People say so. " + "Nobody may enter the garden of the palace after the gates have been closed. That is the rule, and to be clear, "
        "nobody may enter the garden of the palace after the gates have been closed."),
    ("n-grams that repeat are too much of the text", "zh", _ZH[:40] + "本店商品全部包邮正品保证假一罚十欢迎选购。今天有货。本店商品全部包邮正品保证假一罚十欢迎选购。明天也有。"
        "本店商品全部包邮正品保证假一罚十欢迎选购。请放心。本店商品全部包邮正品保证假一罚十欢迎选购。"),
    ("n-grams that repeat are too much of the text", "ja", _JA[:40] + "当店の商品はすべて送料無料で正規品を保証します。今日もあります。当店の商品はすべて送料無料で正規品を保証します。"
        "明日もあります。当店の商品はすべて送料無料で正規品を保証します。どうぞ。当店の商品はすべて送料無料で正規品を保証します。"),
    ("too few lines with an end mark", "en", _MENU_EN),
    ("too few lines with an end mark", "zh", _NAV_ZH),
    ("lorem ipsum", "en", _EN + " Lorem ipsum dolor sit amet, consectetur adipiscing elit."),
    ("lorem ipsum", "zh", _ZH + "Lorem ipsum dolor sit amet。"),
    ("curly bracket", "en", _EN + " Dear {name}, your order {number} is on its way."),
    ("curly bracket", "zh", _ZH + "function show() { return true; }"),
    ("too many lines with javascript", "en", "Please enable JavaScript to view the comments.\nThis page needs Javascript, and it does not work without that.\n"
        + _EN.split(". ")[0] + ".\nYour browser does not support javascript, or it has been turned off.\n" + _EN.split(". ")[1] + ".\n"
        "Turn on JavaScript and load the page again."),
    ("too much of the text is addresses of pages", "en", _EN[:200] + ". " + " ".join(f"https://example.com/shop/{w}/index-{n}.html" for n, w in
        enumerate("boats nets bread sails rocks wind weather harbour".split()))),
    ("too much of the text is addresses of pages", "zh", _ZH[:60] + "。" + "，".join(f"http://www.example.cn/news/2021/{n}/page{n * 37}.html" for n in range(6)) + "。"),
    ("too much of the text is digits", "en", _EN[:170] + " and to the list: " + " ".join(f"c{n}{n * 7919 % 100000}" for n in range(1000, 1045)) + "."),
    ("too much of the text is digits", "zh", "开奖结果如下，请查看：" + "，".join(f"第{n}期{n * 7919 % 1000000}" for n in range(2021001, 2021016)) + "。"),
    ("too much of the text is symbols", "en", _EN.replace(" ", " =+= ").replace("=+= the", "~*~ the")),
    ("too much of the text is symbols", "zh", _ZH.replace("，", "★★◆◆★★【】").replace("。", "※※→→※※▲▲").replace("的", "■的■") + "。"),
    ("too few words in the script of the language", "zh", "我们的新款手机。" +
        "Snapdragon AMOLED Dolby Vision Gorilla Glass Bluetooth Type-C NFC GPS GLONASS Galileo WLAN Hotspot Android Launcher "
        "Camera Sensor Macro Ultrawide Telephoto Selfie Portrait Night Mode Slow Motion Time Lapse Panorama Charger Adapter Cable Case Strap Speaker Earphone Headset "
        "Keyboard Mouse Monitor Router Printer Scanner Projector 和是。"),
    ("too few words in the script of the language", "ja", "新しい商品の入荷のお知らせです。" +
        "Snapdragon AMOLED Dolby Vision Gorilla Glass Bluetooth Type-C NFC GPS GLONASS Galileo WLAN Hotspot Android Launcher Camera "
        "Sensor Macro Ultrawide Telephoto Selfie Portrait Night Mode Slow Motion Time Lapse Panorama Charger Adapter Cable Case Strap "
        "Speaker Earphone Headset Keyboard Mouse Monitor Router Printer Scanner Projector。"),
    ("too few stop words", "ja", "東京大阪名古屋福岡札幌仙台広島神戸京都横浜千葉埼玉新潟静岡岡山熊本鹿児島長崎那覇高松松山高知徳島金沢福井富山長野甲府水戸宇都宮前橋青森秋田山形盛岡福島大分宮崎佐賀。"),
    ("too much of the text is digits", None, " ".join(f"{n * 7919 % 99991:05d}" for n in range(60))),
    ("too many duplicate paragraphs", "en", _EN.replace(", ", ",\n").replace(". ", ".\n") + "\n\nIt is open.\n\nIt is open.\n\nIt is open."),
    ("n-grams that repeat are too much of the text", "en", _EN + " Many years later she wrote it all down: " + _EN.split(". ")[1] + ". "
        + _EN.split(". ")[2] + ", for so it was."),
]

# Letters in no language: the language step has no name for it, so no rule of a language holds.
NOISE = [" ".join("".join("bcdfghjklmnpqrstvwxz"[(n * 13 + k * 7 + n * k + salt) % 20] for k in range(4 + n % 4)) for n in range(80)) for salt in (0, 3)]

CODE: list[tuple[str | None, str]] = [
    ("curly bracket", "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; ++i) {\n        printf(\"%d\\n\", i * i);\n    }\n    return 0;\n}\n"),
    ("curly bracket", "function area(r) {\n  return Math.PI * r * r;\n}\n\nconst radii = [1, 2, 3];\nfor (const r of radii) {\n  console.log(area(r));\n}\n"),
    ("curly bracket", "fn main() {\n    let total: u64 = (1..=100).sum();\n    println!(\"{}\", total);\n}\n"),
    ("curly bracket", "body { margin: 0; }\nh1 { color: #333; font-size: 2em; }\n.menu li { display: inline; padding: 4px 8px; }\n"),
    ("curly bracket", '{"name": "first", "version": "1.0.0", "scripts": {"test": "run all"}, "license": "MIT"}\n'),
    ("curly bracket", "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tfor i := 0; i < 3; i++ {\n\t\tfmt.Println(i)\n\t}\n}\n"),
    (None, "def mean(values):\n    return sum(values) / len(values)\n\n\nprint(mean([1, 2, 3]))\n"),
    (None, "SELECT name, count(*) FROM visits WHERE year > 2010 GROUP BY name ORDER BY 2 DESC;\n"),
]

HTML: list[tuple[str, str, list[str], list[str]]] = [
    ("en", f"<html><head><title>Harbour</title><style>p {{ color: red }}</style></head><body><h1>A morning</h1><p>{_EN}</p></body></html>",
        ["A morning", "The boat left the harbour"], ["<p>", "color: red"]),
    ("en", f"<div class='story'><p>{_EN}</p><p>Tea &amp; bread cost &pound;3.</p><script>var x = 1 < 2;</script></div>",
        ["Tea & bread cost £3."], ["&amp;", "var x"]),
    ("zh", f"<!DOCTYPE html><html><body><div><p>{_ZH}</p><br/><p>风停了&hellip;&hellip;大家都回家。</p></div></body></html>", ["风停了……大家都回家。"], ["<br", "&hellip;"]),
    ("ja", f"<html lang='ja'><body><article><h2>港の朝</h2><p>{_JA}</p></article></body></html>", ["港の朝", "夜明け前に船は"], ["<article>", "</h2>"]),
    ("en", f"<body><ul><li>Nets</li><li>Bread</li></ul><p>{_EN}</p><p>If a &lt; b then a is smaller.</p></body>",
        ["If a < b then a is smaller.", "Nets"], ["<li>", "&lt;"]),
    ("zh", f"<html><head><meta charset='utf-8'><script type='text/javascript'>alert('你好');</script></head><body><p>{_ZH}</p></body></html>",
        ["天还没亮"], ["alert", "<script"]),
]

PRIVATE: list[tuple[str, str, list[list[str]]]] = [
    ("en", "Write to anna.larsen@example.com or call +1 415-555-0132 before Friday.\n", [["mail", "anna.larsen@example.com"], ["phone", "+1 415-555-0132"]]),
    ("en", "The server at 93.184.216.34 was moved, ask ops-team+night@mail.example.org.\n", [["ip", "93.184.216.34"], ["mail", "ops-team+night@mail.example.org"]]),
    ("en", "Telephone of the office: (212) 555-0187, open on all days but Sunday.\n", [["phone", "(212) 555-0187"]]),
    ("en", "The new address of the router is 2606:2800:220:1:248:1893:25c8:1946 from today.\n", [["ip", "2606:2800:220:1:248:1893:25c8:1946"]]),
    ("en", "Version 1.2.3 of 2019-04-05 has 1234567890 lines, see section 10.2.\n", []),
    ("zh", "有意者请联系李先生，手机13800138000，邮箱lixiansheng@example.cn。\n", [["phone", "13800138000"], ["mail", "lixiansheng@example.cn"]]),
    ("zh", "客服电话：010-62345678，传真同号。\n", [["phone", "010-62345678"]]),
    ("zh", "服务器地址是114.114.115.119，请不要外传。\n", [["ip", "114.114.115.119"]]),
    ("zh", "国际热线：+86 138 0013 8000，全天有人接听。\n", [["phone", "+86 138 0013 8000"]]),
    ("zh", "订单编号为20210304123456789，总价1380元，共3.1.2版。\n", []),
    ("ja", "お問い合わせは03-1234-5678または携帯090-1234-5678まで。\n", [["phone", "03-1234-5678"], ["phone", "090-1234-5678"]]),
    ("ja", "メールはtanaka@example.jpへお送りください。\n", [["mail", "tanaka@example.jp"]]),
    ("ja", "この本は2015年に出版され、全320ページ、定価は1800円です。\n", []),
    ("en", "Install nginx 1.18.40.7 (not v93.184.216.34) on 10.0.0.12, ISBN 978-0-306-40615-7, built 2021-03-04.\n", []),
    ("en", "Clone git@github.com:boats/harbour.git, open logo@2x.png, and multiply a@b.transpose(0) by 3.14159265358979.\n", []),
    ("zh", "邮箱是wang＠163.com，座机021 62345678，预算13812345678元。\n", [["mail", "wang＠163.com"], ["phone", "021 62345678"]]),  # noqa: RUF001
]
