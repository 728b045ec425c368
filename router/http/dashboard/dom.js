// Elements. Whatever others have named (nodes, requests, models) becomes text or an attribute, never markup.

const SVG = "http://www.w3.org/2000/svg";

function build(made, attributes, children) {
  set(made, attributes);
  made.append(...children);
  return made;
}

export function html(tag, attributes = {}, ...children) {
  return build(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

/** Sets attributes; null takes one away. */
export function set(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
  return element;
}

/** Sets text, and touches nothing where it is the same. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
  return element;
}

/** Has `parent` hold one child for each of `items`, in order, made once and kept by `keyOf(item)`. Children that stay in
    place are not moved, so that they keep their focus. */
export function keyed(parent, items, keyOf, make, update) {
  const kept = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  items.forEach((item, index) => {
    const key = String(keyOf(item));
    let child = kept.get(key);
    if (child) kept.delete(key);
    else {
      child = make(item);
      child.dataset.key = key;
    }
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
    update(child, item);
  });
  for (const child of kept.values()) child.remove();
}

export const byId = (id) => document.getElementById(id);
