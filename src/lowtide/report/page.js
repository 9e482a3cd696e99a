"use strict";
(() => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  // Three significant figures, or whole units: the same texts as lowtide.units.format_bytes.
  const bytes = (n) => {
    for (let k = 0; ; k++) {
      const exact = Math.abs(n) / 1024 ** k;
      const places = exact < 10 ? 2 : exact < 100 ? 1 : 0;
      const rounded = Number(exact.toFixed(places));
      if (rounded < 1024 || k === units.length - 1) return `${n < 0 ? "-" : ""}${rounded} ${units[k]}`;
    }
  };
  const percent = (ratio) => `${100 * ratio >= 9.95 ? (100 * ratio).toFixed(0) : Number((100 * ratio).toFixed(1))} %`;
  const slug = (name) => name.replaceAll(" ", "-");
  const make = (tag, name, text) => {
    const node = document.createElement(tag);
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };

  for (const figure of document.querySelectorAll(".lt-memory:not([data-live])")) {
    figure.dataset.live = "";
    const { tracks, categories } = JSON.parse(figure.querySelector(".lt-data").textContent);
    const find = (name) => figure.querySelector(name);
    const [plot, cursor, slider, reading, list] = [".lt-plot", ".lt-cursor", ".lt-moment", ".lt-reading", ".lt-tensors"].map(find);
    let track = tracks[figure.dataset.shown];

    const read = (moment, points) => {
      const total = track.totals[moment];
      const phase = track.phases.find(([, first, stop]) => first <= moment && moment < stop);
      const where = [moment === track.peak ? "At the peak" : `At ${percent(track.at[moment])} of the step`];
      if (phase) where.push(`in ${phase[0]}`);
      const module_ = track.where.length ? track.modules[track.where[moment]] : "";
      if (module_) where.push(`at ${module_}`);
      reading.textContent = `${where.join(", ")}: ${bytes(total)}`;
      slider.value = moment;
      slider.setAttribute("aria-valuetext", reading.textContent);
      cursor.hidden = !points;
      cursor.style.left = `${100 * track.x[moment]}%`;
      const parts = Object.values(track.bytes).reduce((sum, column) => sum + column[moment], 0);
      for (const row of figure.querySelectorAll(".lt-legend tbody tr:not([data-floor])")) {
        const name = row.dataset.category;
        const n = name === undefined ? total : (track.bytes[name] || [])[moment] || 0;
        const cell = row.querySelector(".lt-bytes");
        cell.textContent = bytes(n);
        cell.dataset.bytes = n;
        const bar = row.querySelector(".lt-bar i");
        if (bar) bar.style.width = `${parts > 0 ? Math.max(0, (100 * n) / parts).toFixed(1) : 0}%`;
      }
      const alive = track.tensors.filter(([, , , first, stop]) => first <= moment && moment < stop);
      alive.sort((a, b) => b[2] - a[2]);
      list.replaceChildren(
        ...alive.slice(0, 8).map(([name, category, n]) => {
          const item = make("li");
          item.append(make("i", `lt-swatch lt-${slug(categories[category] || "")}`), make("code", "", track.names[name]), make("b", "", bytes(n)));
          return item;
        }),
      );
      if (!alive.length) list.append(make("li", "", "none that is known by name"));
    };

    const nearest = (share) => {
      let low = 0;
      let high = track.x.length;
      while (high - low > 1) {
        const middle = (low + high) >> 1;
        if (track.x[middle] <= share) low = middle;
        else high = middle;
      }
      return low;
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      // The peak is found also where it lasts for less than a pixel.
      const at = (event.clientX - box.left) / box.width;
      const reach = 3 / box.width;
      read(Math.abs(track.x[track.peak] - at) <= reach ? track.peak : nearest(at), true);
    };
    plot.addEventListener("pointermove", point);
    plot.addEventListener("pointerdown", point);
    plot.addEventListener("pointerleave", () => read(track.peak, false));
    slider.addEventListener("input", () => read(Number(slider.value), true));

    const show = (name) => {
      figure.dataset.shown = name;
      track = tracks[name];
      for (const group of figure.querySelectorAll(".lt-track")) group.classList.toggle("is-outline", group.dataset.track !== name);
      const shown = find(`.lt-track[data-track="${name}"]`);
      shown.parentNode.insertBefore(find(".lt-track.is-outline") || shown, shown.nextSibling);
      for (const line of figure.parentNode.querySelectorAll(".lt-peak-sentence")) line.hidden = line.dataset.track !== name;
      slider.max = track.x.length - 1;
      read(track.peak, false);
    };
    for (const option of figure.querySelectorAll(".lt-choice input")) option.addEventListener("change", () => show(option.value));
    show(figure.dataset.shown);
  }

  const button = document.getElementById("lt-theme");
  if (button) {
    const prefers = matchMedia("(prefers-color-scheme: dark)");
    const isDark = () => (document.body.dataset.theme || (prefers.matches ? "dark" : "light")) === "dark";
    const name = () => {
      button.setAttribute("aria-pressed", String(isDark()));
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", isDark() ? "Use light colours" : "Use dark colours");
    };
    button.addEventListener("click", () => {
      document.body.dataset.theme = isDark() ? "light" : "dark";
      name();
    });
    prefers.addEventListener("change", name);
    name();
  }
})();
